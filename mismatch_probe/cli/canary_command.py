"""What `train --canary` does once its flags are parsed; imported only then, because it loads the heavy parts."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from mismatch_probe.cli.output import noise_in, print_json, results
from mismatch_probe.cli.train_command import kept_guards, training_values
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_many, write_number
from mismatch_probe.records.kinds import TRAININGS, to_resume
from mismatch_probe.records.training_run import Canary, TrainingDirectory
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.parts import hold_canary
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import resume_training

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
