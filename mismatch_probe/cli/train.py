"""`mismatch-probe train` and `mismatch-probe sanity`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import MODEL, REWARD_HELP, TASK_HELP, Flag, gives_settings
from mismatch_probe.errors import ExitCode, TrainingStopped, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch_probe.guards.rules.base import GuardSettings
    from mismatch_probe.records.training_run import TrainingDirectory

TRAINING: Final = {
    **MODEL,
    "task": Flag("task.source", TASK_HELP, default="sums:medium"),
    "num_problems": Flag(
        "task.num_problems", "Problems to train on; unless given, all of a file, 256 of a task that makes them.", int
    ),
    "reward": Flag("task.reward", REWARD_HELP),
    "objective": Flag(
        "objective.name", "reinforce, grpo, dr-grpo, gspo, pg-seq-is, ppo, … (see the documentation).", default="grpo"
    ),
    "train_dtype": Flag("train_dtype", f"The training path computes in: {options.DTYPES}.", default="fp16"),
    "infer_dtype": Flag("infer_dtype", f"The engine samples in: {options.DTYPES}.", default="fp16"),
    "steps": Flag("steps", "Train up to this step.", int, default="100"),
    "learning_rate": Flag("optimizer.learning_rate", "Highest learning rate of AdamW.", float, default="1e-6"),
    "prompts_per_step": Flag("rollout.prompts", "Problems sampled in one step.", int, default="32"),
    "samples_per_prompt": Flag("rollout.samples", "Responses sampled for each problem.", int, default="8"),
    "max_new_tokens": Flag("rollout.max_new_tokens", "Longest response, in tokens.", int, default="1024"),
    "temperature": Flag("rollout.temperature", "Sampling temperature, the same on both sides.", float, default="1"),
    "lora_rank": Flag("policy.lora.rank", "Train adapters of this rank instead of all weights.", int),
    "guards": Flag("guards", "Guard file; the built-in guards unless given.", Path),
    "checkpoint_every": Flag("checkpoint.every", "Steps between checkpoints.", int, default="50"),
    "report_to": Flag("report_to", "wandb, tensorboard, trackio (repeatable).", list[str]),
    "seed": Flag("seed", "Seed of problems, sampling and adapters.", int, default="0"),
}


@gives_settings(TRAINING)
def train(
    flag_values: dict[str, Any],
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    infer: options.ServerSide = None,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="Train nothing: sync, sample and compare once, and show what the guards say of it.",
            rich_help_panel=options.GUARDS,
        ),
    ] = False,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Train with reinforcement learning, guarded by the mismatch between vLLM and the training path.

    Engine arguments pass through: --vllm.KEY VALUE. On several GPUs: torchrun --nproc-per-node N -m mismatch_probe
    train …
    """
    flag_values = flag_values | options.server_side(infer)
    if canary:
        return _hold_canary(flag_values, config=config, out=out, resume=resume, json_output=json_output)
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.cli.training_watch import training_listener
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.train import TrainSettings
    from mismatch_probe.records.files import RunKind, to_resume
    from mismatch_probe.records.training_run import TrainingDirectory
    from mismatch_probe.report.answers.train import training_answer
    from mismatch_probe.report.screen import print_answer
    from mismatch_probe.report.training.page import read_runs
    from mismatch_probe.train.distributed import is_main, world_size
    from mismatch_probe.train.preparation import default_training_path, prepare_training
    from mismatch_probe.train.run import execute_training, resume_training, start_training

    earlier_run = TrainingDirectory(to_resume(out, RunKind.TRAINING)) if resume else None
    settings = parse_settings(TrainSettings, _training_values(flag_values, config, earlier_run))
    preparation = prepare_training(settings, kept_guards(flag_values, config, earlier_run))
    if out is None and world_size() > 1:
        raise UsageError("several ranks need one run directory; give --out")
    path = out or default_training_path()
    directory = (start_training if earlier_run is None else resume_training)(path, preparation)
    code = ExitCode.PASS
    try:
        with training_listener("train", directory, preparation.settings, is_new=earlier_run is None) as (_, listener):
            execute_training(directory, preparation, listener)
    except TrainingStopped as stop:
        code = stop.exit_code
    if is_main():
        console, runs = results(as_json=json_output), read_runs([directory], directory.report_path)
        print_answer(training_answer(runs), console)
        print_outcome(console, directory.report_path, runs[0][1], as_json=json_output)
    return code


def _training_values(
    flags: Mapping[str, Any], config: Path | None, earlier_run: TrainingDirectory | None
) -> dict[str, Any]:
    """Settings before they are checked: those recorded, below the configuration file's, below the flags'.

    Raises:
        UsageError: the file cannot be read, nothing names a model, or what was recorded runs code and is not given now.
    """
    from mismatch_probe.config.load import given_settings
    from mismatch_probe.config.resuming import resumed_settings

    values = given_settings(config, flags)
    if earlier_run is not None:
        values = resumed_settings(
            earlier_run.path, earlier_run.read_training_manifest().settings.model_dump(mode="json"), values
        )
    if "model" not in values:
        raise UsageError("no model to train; give --model FOLDER, a hub id, or `--model demo`")
    return values


def kept_guards(
    flags: Mapping[str, Any], config: Path | None, earlier_run: TrainingDirectory | None
) -> tuple[GuardSettings, ...] | None:
    """The guards that a run goes on with where neither a flag nor the configuration file names any.

    Raises:
        UsageError: a file cannot be read, or this version cannot use a guard of the run.
    """
    from mismatch_probe.config.load import given_settings
    from mismatch_probe.guards.rules import recorded_guards

    flag_values = given_settings(config, flags)
    if earlier_run is None or "guards" in flag_values:
        return None
    return recorded_guards(earlier_run.read_training_manifest().guards, str(earlier_run.manifest_path)) or None


def _hold_canary(
    flag_values: dict[str, Any], *, config: Path | None, out: Path | None, resume: bool, json_output: bool
) -> ExitCode:
    """Compare both sides once, and print what the guards say of it. Nothing is written.

    Raises:
        MismatchProbeError: anything that stops it, as one sentence.
    """
    from tempfile import TemporaryDirectory

    from mismatch_probe.cli.output import noise_in, print_json, results
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.train import TrainSettings
    from mismatch_probe.records.files import TRAININGS, to_resume
    from mismatch_probe.records.training_run import TrainingDirectory
    from mismatch_probe.report.answers.train import canary_answer
    from mismatch_probe.report.screen import print_answer
    from mismatch_probe.train.distributed import is_main
    from mismatch_probe.train.parts import hold_canary
    from mismatch_probe.train.preparation import prepare_training
    from mismatch_probe.train.run import resume_training

    if resume != (out is not None):
        raise UsageError(
            "--canary writes nothing: give --resume with --out to look at the newest checkpoint of a run, or neither "
            "to look at --model"
        )
    earlier_run = TrainingDirectory(to_resume(out, *TRAININGS)) if resume else None
    settings = parse_settings(TrainSettings, _training_values(flag_values, config, earlier_run))
    preparation = prepare_training(settings, kept_guards(flag_values, config, earlier_run))
    run = None if earlier_run is None else resume_training(earlier_run.path, preparation)
    with TemporaryDirectory() as scratch, noise_in(Path(scratch) / "canary.log"):
        canary = hold_canary(preparation, run)
    if is_main():
        print_answer(canary_answer(canary), results(as_json=json_output))
        if json_output:
            print_json(canary)
    return ExitCode.GATE_FAILED if canary.fired else ExitCode.PASS


_PROBLEMS: Final = {
    "candidates": Flag("sanity.candidates", "How many problems of the task to try at most; 256 unless given.", int),
    "solve_samples": Flag(
        "sanity.solve_samples", "Responses sampled for each problem that is tried; 40 unless given.", int
    ),
    "keep_low": Flag("sanity.keep_low", "Lowest solve rate of a problem that is kept; 0.2 unless given.", float),
    "keep_high": Flag("sanity.keep_high", "Highest solve rate of a problem that is kept; 0.8 unless given.", float),
}


@gives_settings(TRAINING, _PROBLEMS)
def sanity(
    flag_values: dict[str, Any],
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
    from mismatch_probe.config.train import TrainSettings
    from mismatch_probe.reading import merge_tables
    from mismatch_probe.records.files import RunKind, to_resume
    from mismatch_probe.records.training_run import SanityDirectory, SanityRecord
    from mismatch_probe.report.answers.train import sanity_answer
    from mismatch_probe.report.screen import print_answer
    from mismatch_probe.train.distributed import is_main
    from mismatch_probe.train.preparation import default_training_path
    from mismatch_probe.train.run import resume_training, start_training
    from mismatch_probe.train.sanity import execute_sanity, prepare_sanity

    flag_values = flag_values | options.server_side(infer)
    directory = SanityDirectory(to_resume(out, RunKind.SANITY) if resume else out or default_training_path("sanity"))
    values = _training_values(flag_values, config, directory if resume else None)
    guards = kept_guards(flag_values, config, directory if resume else None)
    earlier_run = directory.read_sanity() if resume else None
    base = {} if earlier_run is None else earlier_run.settings.model_dump(mode="json")
    settings = parse_settings(SanitySettings, merge_tables(base, values.pop("sanity", {})))
    preparation = prepare_sanity(parse_settings(TrainSettings, values), settings, guards)
    if earlier_run is None:
        earlier_run = SanityRecord(settings=settings)
        start_training(directory.path, preparation, partial(directory.write_sanity, earlier_run))
    else:
        resume_training(directory.path, preparation)
    if not earlier_run.passed:
        with training_listener("sanity", directory, preparation.settings, is_new=True) as (quiet, listener):
            earlier_run = execute_sanity(directory, preparation, earlier_run, listener, partial(_tell, quiet))
    console = results(as_json=json_output)
    if is_main():
        print_answer(sanity_answer(earlier_run), console)
    page = directory.report_path
    print_outcome(console, page if page.exists() else None, earlier_run, as_json=json_output)
    return ExitCode.PASS if earlier_run.passed else ExitCode.GATE_FAILED


def _tell(console: Console, sentence: str) -> None:
    from mismatch_probe.train.distributed import is_main

    if is_main():
        console.print(sentence, soft_wrap=True, highlight=False)
