"""`mismatch-probe sanity`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.cli.train import TRAINING, kept_guards, training_values
from mismatch_probe.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

_PROBLEMS: Final = {
    "candidates": Flag("sanity.candidates", "Most problems of the task to try; 256 unless given.", int),
    "solve_samples": Flag("sanity.solve_samples", "Responses that a candidate is tried with; 40 unless given.", int),
    "keep_low": Flag("sanity.keep_low", "Least solve rate of a kept one; 0.2 unless given.", float),
    "keep_high": Flag("sanity.keep_high", "Highest solve rate of a kept one; 0.8 unless given.", float),
}


@gives_settings(TRAINING, _PROBLEMS)
def sanity(
    given: dict[str, Any],
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    infer: options.ServerSide = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Keep the problems that the model solves now and then, train on them, and pass when it solves over 95 %.

    Exit code 0 when passed, 1 when not. Engine arguments pass through: --vllm.KEY VALUE.
    """
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.cli.training_watch import training_listener
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.model import SanitySettings
    from mismatch_probe.config.nested import merged
    from mismatch_probe.config.train import TrainSettings
    from mismatch_probe.records.kinds import Kind, to_resume
    from mismatch_probe.records.training_run import SanityDirectory, SanityRecord
    from mismatch_probe.report.answers.train import sanity_answer
    from mismatch_probe.report.screen import print_answer
    from mismatch_probe.train.distributed import is_main
    from mismatch_probe.train.preparation import default_training_path
    from mismatch_probe.train.run import resume_training, start_training
    from mismatch_probe.train.sanity import execute_sanity, prepare_sanity

    given = given | options.server_side(infer)
    directory = SanityDirectory(to_resume(out, Kind.SANITY) if resume else out or default_training_path("sanity"))
    values = training_values(given, config, directory if resume else None)
    guards = kept_guards(given, config, directory if resume else None)
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
        with training_listener("sanity", directory, preparation.settings, is_new=True) as (quiet, listener):
            recorded = execute_sanity(directory, preparation, recorded, listener, partial(_tell, quiet))
    console = results(as_json=json_output)
    if is_main():
        print_answer(sanity_answer(recorded), console)
    page = directory.report_path
    print_outcome(console, page if page.exists() else None, recorded, as_json=json_output)
    return ExitCode.PASS if recorded.passed else ExitCode.GATE_FAILED


def _tell(console: Console, sentence: str) -> None:
    from mismatch_probe.train.distributed import is_main

    if is_main():
        console.print(sentence, soft_wrap=True, highlight=False)
