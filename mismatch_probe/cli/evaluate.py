"""`mismatch-probe evaluate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.cli import options
from mismatch_probe.cli.compare import side_values
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.reading import merge_tables, nest_names

if TYPE_CHECKING:
    from mismatch_probe.records.answers import EvaluationDirectory

_PROBLEMS: Final = {
    "task": Flag("prompts.source", options.TASK_HELP, default="sums:medium"),
    "num_problems": Flag(
        "prompts.num_prompts", "How many problems; 256, or all of a smaller source, unless given.", int
    ),
    "reward": Flag("evaluation.reward", options.REWARD_HELP),
    "samples_per_prompt": Flag(
        "sampling.samples_per_prompt", "Responses sampled for each problem; 4 unless given.", int
    ),
    "seed": Flag("sampling.seed", "Seed of problems and sampling.", int, default="0"),
    "sample_pi": Flag("evaluation.sample_pi", "Also sample responses on the training path itself; slower.", bool),
}


@gives_settings(options.MODEL, _PROBLEMS, options.MAX_NEW_TOKENS, options.TEMPERATURE, options.DEVICE)
def evaluate(
    flag_values: dict[str, Any],
    dtype: options.BothDtypes = None,
    train_dtype: options.TrainDtypes = None,
    infer_dtype: options.InferDtypes = None,
    train: options.TrainSides = None,
    infer: options.InferSides = None,
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Measure the accuracy under the engine and on the training path, for each pair of sides: what deployment loses.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    flags = flag_values | nest_names(side_values(dtype, train_dtype, infer_dtype, train, infer))
    from mismatch_probe.children.servers import warm_up

    warm_up("training", "engine")
    from mismatch_probe.cli.output import can_go_on, narration, noise_in, print_outcome, results
    from mismatch_probe.cli.progress import progress_listener
    from mismatch_probe.compare.cost.forecast import run_clock
    from mismatch_probe.config.comparison import CompareSettings
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.model import EvaluationSettings
    from mismatch_probe.dtypes import side_label
    from mismatch_probe.evaluate.estimates import sides_still_to_sample
    from mismatch_probe.evaluate.run import (
        default_evaluation_path,
        execute_evaluation,
        prepare_evaluation,
        resume_evaluation,
        start_evaluation,
    )
    from mismatch_probe.records.answers import EvaluationDirectory
    from mismatch_probe.records.files import RunKind, to_resume
    from mismatch_probe.report.answers.evaluate import evaluation_answer
    from mismatch_probe.report.page import write_report
    from mismatch_probe.report.screen import print_answer

    began = time.monotonic()
    run = EvaluationDirectory(to_resume(out, RunKind.EVALUATION) if resume else out or default_evaluation_path())
    values = _evaluation_values(flags, config, run if resume else None)
    settings = parse_settings(EvaluationSettings, values.pop("evaluation", {}))
    comparison = parse_settings(CompareSettings, values)
    all_settings = {**comparison.model_dump(), "evaluation": settings.model_dump()}
    if not resume:
        run.require_free()
    preparation = prepare_evaluation(comparison, settings)
    start = resume_evaluation if resume else start_evaluation
    run = start(run.path, preparation)
    console = narration()
    ready_seconds = time.monotonic() - began if console.is_terminal else None
    clock = run_clock(preparation.comparison, run, ready_seconds=ready_seconds)
    sampled_by_pi = sides_still_to_sample(run) if settings.sample_pi else []
    further = {pi.stage("sample"): f"the training path samples in {side_label(pi.name)}" for pi in sampled_by_pi}
    with (
        can_go_on("evaluate", run, all_settings, console, is_new=not resume),
        noise_in(run.log_path("evaluate")) as quiet,
        progress_listener(quiet, run, clock, further) as listener,
    ):
        evaluation = execute_evaluation(run, preparation, listener)
    console = results(as_json=json_output)
    print_answer(evaluation_answer(evaluation), console)
    print_outcome(console, write_report(run), evaluation, as_json=json_output)
    return ExitCode.PASS


def _evaluation_values(
    flags: dict[str, Any], config: Path | None, earlier_evaluation: EvaluationDirectory | None
) -> dict[str, Any]:
    """The evaluation's defaults, or what was recorded, below the configuration file's settings, below the flags'."""
    from mismatch_probe.compare.preflight import with_typed_engines
    from mismatch_probe.config.load import given_settings
    from mismatch_probe.config.resuming import resumed_comparison, resumed_settings
    from mismatch_probe.evaluate.run import DEFAULTS

    flag_values = given_settings(config, flags)
    if earlier_evaluation is None:
        values = merge_tables(DEFAULTS, flag_values)
    else:
        evaluation_values = {"evaluation": earlier_evaluation.read_evaluation().settings.model_dump(mode="json")}
        changes = {name: flag_values[name] for name in flag_values.keys() & evaluation_values.keys()}
        evaluation_values = resumed_settings(earlier_evaluation.path, evaluation_values, changes)
        comparison_values = {name: value for name, value in flag_values.items() if name not in evaluation_values}
        comparison = resumed_comparison(
            earlier_evaluation.path,
            earlier_evaluation.read_manifest().asked_settings,
            comparison_values,
            with_typed_engines,
        )
        values = comparison.model_dump(mode="json") | evaluation_values
    if "model" not in values:
        raise UsageError("no model to evaluate; give --model FOLDER, a hub id, or `--model demo`")
    return values
