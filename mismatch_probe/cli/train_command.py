"""What `train` does once its flags are parsed; imported only then, because it loads the heavy parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_probe.cli.output import print_outcome, results
from mismatch_probe.cli.training_watch import training_told
from mismatch_probe.config.given_now import going_on
from mismatch_probe.config.load import given_settings, parse_settings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import ExitCode, TrainingStopped, UsageError
from mismatch_probe.guards.load import recorded_guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.records.kinds import Kind, to_resume
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.report.training import render_outcome, summarise_training
from mismatch_probe.train.distributed import is_main, world_size
from mismatch_probe.train.preparation import default_training_path, prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training


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
