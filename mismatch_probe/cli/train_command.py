"""What `train` does once its flags are parsed; imported only then, because it loads the heavy parts.

What `train --canary` does once its flags are parsed; imported only then, because it loads the heavy parts.

What `sanity` does once its flags are parsed; imported only then, because it loads the heavy parts.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from mismatch_probe.cli.output import noise_in, print_json, print_outcome, results
from mismatch_probe.cli.training_watch import training_told
from mismatch_probe.config.given_now import going_on
from mismatch_probe.config.load import given_settings, parse_settings
from mismatch_probe.config.model import SanitySettings
from mismatch_probe.config.nested import merged
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import ExitCode, TrainingStopped, UsageError
from mismatch_probe.guards.load import recorded_guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_many, write_number
from mismatch_probe.records.kinds import TRAININGS, Kind, to_resume
from mismatch_probe.records.training_run import Canary, SanityDirectory, SanityRecord, TrainingDirectory
from mismatch_probe.report.training import render_outcome, render_sanity, summarise_training
from mismatch_probe.train.distributed import is_main, world_size
from mismatch_probe.train.parts import hold_canary
from mismatch_probe.train.preparation import default_training_path, prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training
from mismatch_probe.train.sanity import execute_sanity, prepare_sanity


def run_train(
    flags: dict[str, Any], *, config: Path | None, out: Path | None, resume: bool, json_output: bool
) -> ExitCode:
    """Parse, validate, train, say where things are.

    Raises:
        MismatchProbeError: anything that stops the run, as one sentence.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    recorded = TrainingDirectory(to_resume(out, Kind.TRAINING)) if resume else None
    settings = parse_settings(TrainSettings, training_values(flags, config, recorded))
    preparation = prepare_training(settings, kept_guards(flags, config, recorded))
    if out is None and world_size() > 1:
        raise UsageError("several ranks need one run directory; give --out")
    path = out or default_training_path()
    directory = (start_training if recorded is None else resume_training)(path, preparation)
    code = ExitCode.PASS
    try:
        with training_told("train", directory, preparation.settings, is_new=recorded is None) as (_, listener):
            execute_training(directory, preparation, listener)
    except TrainingStopped as stop:
        code = stop.exit_code
    if is_main():
        console, summary = results(as_json=json_output), summarise_training(directory)
        render_outcome(summary, console)
        print_outcome(console, directory.report_path, summary, as_json=json_output)
    return code


def training_values(
    flags: Mapping[str, Any], config: Path | None, recorded: TrainingDirectory | None
) -> dict[str, Any]:
    """Settings before they are checked: those recorded, below the configuration file's, below the flags'.

    Raises:
        UsageError: the file cannot be read, nothing names a model, or what was recorded runs code and is not given now.
    """
    values = given_settings(config, flags)
    if recorded is not None:
        values = going_on(recorded.path, recorded.read_training_manifest().settings.model_dump(mode="json"), values)
    if "model" not in values:
        raise UsageError("no model to train; give --model FOLDER, a hub id, or `--model demo`")
    return values


def kept_guards(
    flags: Mapping[str, Any], config: Path | None, recorded: TrainingDirectory | None
) -> tuple[GuardSettings, ...] | None:
    """The guards that a run goes on with where neither a flag nor the configuration file names any.

    Raises:
        UsageError: a file cannot be read, or this version cannot use a guard of the run.
    """
    given = given_settings(config, flags)
    if recorded is None or "guards" in given:
        return None
    return recorded_guards(recorded.read_training_manifest().guards, str(recorded.manifest_path)) or None


_SHOWN = (
    ("k3", "mismatch/kl_k3"),
    ("pi-mu max", "mismatch/prob_diff_max"),
    ("probe k3", "sync/probe_k3"),
    ("entropy", "policy/entropy"),
)


def run_canary(
    flags: dict[str, Any], *, config: Path | None, out: Path | None, resume: bool, json_output: bool
) -> ExitCode:
    """Parse, validate, hold both sides against each other, say what the guards think of it. Nothing is written.

    Raises:
        MismatchProbeError: anything that stops it, as one sentence.
    """
    if resume != (out is not None):
        raise UsageError(
            "--canary writes nothing: give --resume with --out to look at the newest checkpoint of a run, or neither "
            "to look at --model"
        )
    recorded = TrainingDirectory(to_resume(out, *TRAININGS)) if resume else None
    settings = parse_settings(TrainSettings, training_values(flags, config, recorded))
    preparation = prepare_training(settings, kept_guards(flags, config, recorded))
    run = None if recorded is None else resume_training(recorded.path, preparation)
    with TemporaryDirectory() as scratch, noise_in(Path(scratch) / "canary.log"):
        canary = hold_canary(preparation, run)
    if is_main():
        _show(canary, results(as_json=json_output))
        if json_output:
            print_json(canary)
    return ExitCode.GATE_FAILED if canary.fired else ExitCode.PASS


def _show(canary: Canary, console: Console) -> None:
    values = ", ".join(
        f"{title} {write_number(canary.metrics[name])}" for title, name in _SHOWN if name in canary.metrics
    )
    number = len(canary.fired)
    guards = f"{write_many(number, 'guard')} {'fires' if number == 1 else 'fire'}" if number else "no guard fires"
    where = f"the weights of step {canary.step}" if canary.step else "the weights of the model itself"
    console.print(f"canary on {where}: {values}; {guards}", soft_wrap=True, highlight=False)
    for event in canary.fired:
        console.print(Text(plain(f"  guard {event['guard']}: {event['sentence']}")), soft_wrap=True)


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
