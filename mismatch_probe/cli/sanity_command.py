"""What `sanity` does once its flags are parsed; imported only then, because it loads the heavy parts."""

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mismatch_probe.cli.output import print_outcome, results
from mismatch_probe.cli.train_command import kept_guards, training_values
from mismatch_probe.cli.training_watch import training_told
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import SanitySettings
from mismatch_probe.config.nested import merged
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.kinds import Kind, to_resume
from mismatch_probe.records.training_run import SanityDirectory, SanityRecord
from mismatch_probe.report.training import render_sanity
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.preparation import default_training_path
from mismatch_probe.train.run import resume_training, start_training
from mismatch_probe.train.sanity import execute_sanity, prepare_sanity


def run_sanity(
    flags: dict[str, Any], *, config: Path | None, out: Path | None, resume: bool, json_output: bool
) -> ExitCode:
    """Parse, validate, choose problems, train, judge.

    Raises:
        MismatchProbeError: anything but a guard that stops the run, as one sentence.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    directory = SanityDirectory(to_resume(out, Kind.SANITY) if resume else out or default_training_path("sanity"))
    values = training_values(flags, config, directory if resume else None)
    guards = kept_guards(flags, config, directory if resume else None)
    recorded = directory.read_sanity() if resume else None
    base = {} if recorded is None else recorded.settings.model_dump(mode="json")
    settings = parse_settings(SanitySettings, merged(base, values.pop("sanity", {})))
    preparation = prepare_sanity(parse_settings(TrainSettings, values), settings, guards)
    if recorded is None:
        recorded = SanityRecord(settings=settings)
        start_training(directory.path, preparation, partial(directory.write_sanity, recorded))
    else:
        resume_training(directory.path, preparation)
    if not recorded.passed:
        with training_told("sanity", directory, preparation.settings, is_new=True) as (quiet, listener):
            recorded = execute_sanity(directory, preparation, recorded, listener, partial(_tell, quiet))
    console = results(as_json=json_output)
    if is_main():
        render_sanity(recorded, console)
    page = directory.report_path
    print_outcome(console, page if page.exists() else None, recorded, as_json=json_output)
    return ExitCode.PASS if recorded.passed else ExitCode.GATE_FAILED


def _tell(console: Console, sentence: str) -> None:
    if is_main():
        console.print(sentence, soft_wrap=True, highlight=False)
