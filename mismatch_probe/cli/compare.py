"""`mismatch-probe compare`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Dtypes, Flag, SideOptions, gives_settings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.reading import nest_names

if TYPE_CHECKING:
    from mismatch_probe.config.comparison import CompareSettings
    from mismatch_probe.records.run_directory import RunDirectory

_SIDES: Final = {
    "reference": Flag("reference.dtype", "Dtype of the reference of both sides: fp32, fp64, none.", default="fp32"),
    "reference_by_layer": Flag("reference.by_layer", "Hold one layer of the reference's weights at a time.", bool),
    "train_precision": Flag(
        "training.precision", "How pi is brought to its dtype: weights, to, autocast, fsdp.", default="weights"
    ),
    "train_ranks": Flag("training.ranks", "How many processes hold pi and the reference, each a part (FSDP2).", int),
}
_NUM_PROMPTS: Final = {
    "num_prompts": Flag(
        "prompts.num_prompts", "How many prompts to use; 64, or all of a smaller source, unless given.", int
    )
}


@gives_settings(
    options.MODEL,
    options.PROMPTS,
    _NUM_PROMPTS,
    options.SAMPLES_PER_PROMPT,
    options.MAX_NEW_TOKENS,
    options.TEMPERATURE,
    options.SEED,
    _SIDES,
    options.ATTENTION,
    options.DEVICE,
)
def compare(
    flag_values: dict[str, Any],
    dtype: options.BothDtypes = None,
    train_dtype: options.TrainDtypes = None,
    infer_dtype: options.InferDtypes = None,
    train: options.TrainSides = None,
    infer: options.InferSides = None,
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="Gate file: judge the run, and extend it while inconclusive.", rich_help_panel=options.GATE),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Run directory that max_regression compares with.", rich_help_panel=options.GATE),
    ] = None,
    without_baseline: Annotated[
        bool,
        typer.Option("--without-baseline", help=options.WITHOUT_BASELINE_HELP, rich_help_panel=options.GATE),
    ] = False,
    headroom: Annotated[
        bool,
        typer.Option("--headroom", help="Examine the checkpoint for FP16 too: the answer says whether to train in it."),
    ] = False,
    json_output: options.JsonOutput = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, do nothing.")] = False,
) -> ExitCode:
    """Sample with vLLM, score the same tokens on the training path and in FP32, and name the cause of the mismatch.

    Engine arguments pass through: --vllm.KEY VALUE, for instance --vllm.tensor_parallel_size 2. Where
    torchrun starts it, its ranks hold pi and the reference.
    """
    flags = flag_values | nest_names(side_values(dtype, train_dtype, infer_dtype, train, infer))
    from mismatch_probe.compare.torchrun import join_ranks

    with join_ranks() as torchrun:
        if torchrun is not None and torchrun.rank:
            return torchrun.follow()
        options.announce("Reading settings, prompts and checkpoint")
        from mismatch_probe.children.servers import warm_up

        warm_up("training", "engine")
        from mismatch_probe.cli.examinations import examine_run
        from mismatch_probe.cli.gate_answers import GatedCompare
        from mismatch_probe.cli.output import can_go_on, narration, print_json, print_outcome, results
        from mismatch_probe.cli.progress import Later, progress_listener
        from mismatch_probe.compare.cost.forecast import run_clock
        from mismatch_probe.compare.estimates import done_stages, headroom_outlook, look_ahead
        from mismatch_probe.compare.preparation import default_run_path, prepare
        from mismatch_probe.compare.run import execute, resume_run, start_run
        from mismatch_probe.config.resuming import held_by_ranks
        from mismatch_probe.records.files import RunKind, to_resume
        from mismatch_probe.records.findings import Findings
        from mismatch_probe.records.run_directory import RunDirectory
        from mismatch_probe.report.answers.gate import gate_answer
        from mismatch_probe.report.page import answer_on_screen, full_summary, write_report
        from mismatch_probe.report.screen import print_answer

        began = time.monotonic()
        console = narration()
        if (baseline is not None or without_baseline) and gate is None:
            flag = "--without-baseline" if without_baseline else "--baseline"
            raise UsageError(f"{flag} needs --gate: the file that says how much worse than a baseline is too much")
        earlier_run = RunDirectory(to_resume(out, RunKind.COMPARISON)) if resume else None
        settings = _settings(flags, config, earlier_run)
        if torchrun is not None:
            settings = held_by_ranks(settings, torchrun.ranks)
        gated_compare = None if gate is None else GatedCompare.open(gate, baseline, without_baseline=without_baseline)
        if gated_compare is not None:
            settings = gated_compare.settings_to_start(settings, earlier_run, console)
        path = out or default_run_path()
        if earlier_run is None and not dry_run:
            RunDirectory(path).require_free()
        examines = headroom and (earlier_run is None or Findings(path).headroom() is None)
        preparation = prepare(settings, with_rehearsal=dry_run)
        if dry_run:
            from mismatch_probe.cli.dry_run import dry_run_answer

            names_done, seconds = done_stages(earlier_run), time.monotonic() - began
            plan = look_ahead(preparation, path.parent, names_done, seconds, with_headroom=examines)
            print_answer(dry_run_answer(plan), results(as_json=json_output))
            if json_output:
                print_json(plan)
            return ExitCode.PASS
        run = start_run(path, preparation) if earlier_run is None else resume_run(path, preparation)
        continue_flags = [
            *([] if gated_compare is None else gated_compare.flags),
            *(["--headroom"] if headroom else []),
        ]
        with can_go_on(
            "compare", run, settings.model_dump(), console, is_new=earlier_run is None, flags=continue_flags
        ):
            ready_seconds = time.monotonic() - began if console.is_terminal else None
            clock = run_clock(preparation, run, ready_seconds=ready_seconds)
            forecast = headroom_outlook(preparation, path.parent) if examines and console.is_terminal else None
            later_seconds = None if forecast is None else forecast.time.likely_seconds
            last_part = Later("headroom", later_seconds) if examines else None
            with progress_listener(console, run, clock, last_part=last_part) as listener:
                execute(run, listener)
            write_report(run)
            gate_outcome = None if gated_compare is None else gated_compare.run(run, console, lambda: write_report(run))
            refusal = examine_run(run, forecast) if headroom else None
        summary, console = full_summary(run), results(as_json=json_output)
        answer = answer_on_screen(summary, run.path)
        if refusal is not None:
            headline = f"{summary.headline} {refusal}"
            summary, answer = summary.model_copy(update={"headline": headline}), replace(answer, headline=headline)
        print_answer(answer, console)
        if gate_outcome is not None:
            console.print()
            print_answer(gate_answer(gate_outcome), console)
        print_outcome(console, run.report_path, summary, as_json=json_output)
        return summary.exit_code if gate_outcome is None else gate_outcome.exit_code


def side_values(
    dtypes: Dtypes, train_dtypes: Dtypes, infer_dtypes: Dtypes, train: SideOptions, infer: SideOptions
) -> dict[str, Any]:
    """The pairs that the dtype flags ask for, or the sides that --train and --infer give, each against each.

    Raises:
        UsageError: the flags contradict each other, or a side is not written as one.
    """
    pairs = pairs_of(dtypes, train_dtypes, infer_dtypes)
    if not (train or infer):
        return {"pairs": pairs}
    if pairs is not None:
        raise UsageError("--train and --infer say what is compared; leave --dtype, --train-dtype and --infer-dtype out")
    from mismatch_probe.config.load import parse_sides

    texts_of = (("train", train), ("infer", infer))
    sides = {kind: [side for text in texts for side in parse_sides(kind, text)] for kind, texts in texts_of if texts}
    if len(sides) == 1:
        return sides
    return sides | {"pairs": [(side["name"], other["name"]) for side in sides["train"] for other in sides["infer"]]}


def pairs_of(dtypes: Dtypes, train: Dtypes, infer: Dtypes) -> list[tuple[Dtype, Dtype]] | None:
    """The pairs (train, infer) that the dtype flags ask for; None where none is given.

    Raises:
        UsageError: the flags contradict each other, one side is missing, or a name is none of a dtype.
    """
    both, trains, infers = ([Dtype.parse(dtype) for dtype in names or ()] for names in (dtypes, train, infer))
    if not trains and not infers:
        return [(dtype, dtype) for dtype in both] or None
    if both:
        raise UsageError("--dtype sets both sides; give either --dtype, or --train-dtype with --infer-dtype")
    if not (trains and infers):
        raise UsageError(
            "--train-dtype and --infer-dtype go together; give both, or --dtype for the same on both sides"
        )
    return [(train, other) for train in trains for other in infers]


def _settings(flags: dict[str, Any], config: Path | None, earlier_run: RunDirectory | None) -> CompareSettings:
    from mismatch_probe.compare.preflight import with_typed_engines
    from mismatch_probe.config.comparison import CompareSettings
    from mismatch_probe.config.load import given_settings, parse_settings
    from mismatch_probe.config.resuming import resumed_comparison

    values = given_settings(config, flags)
    if earlier_run is not None:
        return resumed_comparison(
            earlier_run.path, earlier_run.read_manifest().asked_settings, values, with_typed_engines
        )
    if "model" not in values:
        raise UsageError("no model to compare; give --model FOLDER, a hub id, or `--model demo`")
    return parse_settings(CompareSettings, values)
