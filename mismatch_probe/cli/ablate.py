"""`mismatch-probe ablate`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.cli.train import TRAINING
from mismatch_probe.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch_probe.ablate.run import CellCallback
    from mismatch_probe.config.ablate import Ablation
    from mismatch_probe.records.ablation import AblationDirectory

_GRID: Final = {
    "model": Flag("grid.model", "Checkpoint: a folder, a hub id, or `demo` (repeatable).", list[str]),
    "precision": Flag(
        "grid.precision", "TRAIN/INFER, the dtypes of both sides: bf16/fp16; bf16 is both (repeatable).", list[str]
    ),
    "objective": Flag("grid.objective", "Objective with its correction, as of `train` (repeatable).", list[str]),
    "learning_rate": Flag("grid.learning_rate", "Highest learning rate of AdamW (repeatable).", list[float]),
    "updates": Flag("grid.updates", "Updates on the responses of a step (repeatable).", list[int]),
    "lora_rank": Flag("grid.lora_rank", "Rank of adapters; 0 trains all weights (repeatable).", list[int]),
    "max_new_tokens": Flag("grid.max_new_tokens", "Longest response, in tokens (repeatable).", list[int]),
    "seed": Flag("grid.seed", "Seed of problems, sampling and adapters (repeatable).", list[int]),
}
_OF_TRAIN: Final = {name: flag for name, flag in TRAINING.items() if name not in (*_GRID, "train_dtype", "infer_dtype")}
_LINE_EVERY_SECONDS: Final = 30.0


@gives_settings(_GRID, _OF_TRAIN)
def ablate(
    flag_values: dict[str, Any],
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    sanity: Annotated[
        bool, typer.Option("--sanity", help="Each cell is a sanity test: it ends when the model solves over 95 %.")
    ] = False,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            min=1,
            metavar="CELLS",
            show_default=False,
            help="Cells that run at a time, each on a GPU of its own where there are GPUs; 1 unless given. "
            "With more than 1 their times compare nothing.",
        ),
    ] = 1,
    json_output: options.JsonOutput = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how long the grid takes and whether it fits into memory; do nothing.")
    ] = False,
) -> ExitCode:
    """Train every cell of a grid, and show on one page what each format or rule does over seeds.

    Ends with 4 where a cell broke. Engine arguments pass through: --vllm.KEY VALUE.
    """
    from mismatch_probe.ablate.run import (
        check_cells,
        default_ablation_path,
        execute_ablation,
        resume_ablation,
        start_ablation,
    )
    from mismatch_probe.ablate.summarise import publish_ablation
    from mismatch_probe.cli.output import can_go_on, narration, print_outcome, results
    from mismatch_probe.config.ablate import Ablation
    from mismatch_probe.records.ablation import AblationDirectory
    from mismatch_probe.records.files import RunKind, to_resume
    from mismatch_probe.report.answers.ablate import ablation_answer
    from mismatch_probe.report.screen import print_answer
    from mismatch_probe.train.distributed import world_size

    began = time.monotonic()
    if world_size() > 1:
        raise UsageError("ablate starts each cell itself, on this machine; leave torchrun out")
    earlier = AblationDirectory(to_resume(out, RunKind.ABLATION)) if resume else None
    ablation = Ablation.of(_values(flag_values, config, earlier, is_sanity=sanity))
    check_cells(ablation)
    path = out or default_ablation_path()
    if dry_run:
        return _show_forecast(ablation, earlier, path.parent, began, at_once, json_output=json_output)
    places = _places(ablation, earlier, path.parent, began, at_once)
    directory = (start_ablation if earlier is None else resume_ablation)(path, ablation)
    console = narration()
    console.print(f"Run directory: {directory.path}", soft_wrap=True)
    with can_go_on("ablate", directory, ablation.cells[0].settings.model_dump(), console, is_new=not resume):
        try:
            execute_ablation(
                directory, ablation, _cell_progress(console, ablation), partial(publish_ablation, directory), places
            )
        finally:
            result = publish_ablation(directory)
    screen = results(as_json=json_output)
    print_answer(ablation_answer(result), screen)
    print_outcome(screen, directory.report_path, result, as_json=json_output)
    return result.exit_code


def _places(
    ablation: Ablation, earlier: AblationDirectory | None, runs: Path, began: float, at_once: int
) -> list[dict[str, str]]:
    """Where the cells that run at once run; one that runs alone needs no forecast. Raises as `places_for`."""
    from mismatch_probe.ablate.forecast import forecast_ablation, places_for

    if at_once == 1:
        return [{}]
    return places_for(ablation, at_once, forecast_ablation(ablation, earlier, runs, time.monotonic() - began))


def _show_forecast(
    ablation: Ablation, earlier: AblationDirectory | None, runs: Path, began: float, at_once: int, *, json_output: bool
) -> ExitCode:
    """Print what the grid takes; `began` by `time.monotonic`.

    Raises:
        UsageError: so many cells do not run at once.
    """
    from mismatch_probe.ablate.forecast import forecast_ablation, places_for
    from mismatch_probe.cli.dry_run import grid_forecast_answer
    from mismatch_probe.cli.output import print_json, results
    from mismatch_probe.report.screen import print_answer

    forecast = forecast_ablation(ablation, earlier, runs, time.monotonic() - began)
    if at_once > 1:
        places_for(ablation, at_once, forecast)
    print_answer(grid_forecast_answer(forecast), results(as_json=json_output))
    if json_output:
        print_json(forecast)
    return ExitCode.PASS


def _values(
    flags: dict[str, Any], config: Path | None, earlier: AblationDirectory | None, *, is_sanity: bool
) -> dict[str, Any]:
    """Settings and grid before they are checked: those recorded, below the configuration file's, below the flags'.

    Raises:
        UsageError: the file cannot be read or has several grids that flags would change, or what was recorded runs code
            and is not given now.
    """
    from mismatch_probe.config.load import given_settings, read_settings_file
    from mismatch_probe.config.resuming import resumed_settings

    if config is not None and "grid" in flags and isinstance(read_settings_file(config).get("grid"), list):
        raise UsageError(
            f"--config {config} has several grids, and flags say nothing of which one; change the grid there"
        )
    values = given_settings(config, flags)
    if earlier is not None:
        values = resumed_settings(earlier.path, earlier.read_ablation_manifest().settings, values)
    return {**values, "sanity": values.get("sanity", {})} if is_sanity else values


def _cell_progress(console: Console, ablation: Ablation) -> CellCallback:
    """Print a line as a cell begins and ends, and now and then between."""
    from mismatch_probe.ablate.run import CellEnd, CellStart, CellStep
    from mismatch_probe.notation import write_number, write_seconds

    total = len(ablation.cells)
    printed_at = time.monotonic()

    def show(event: CellStart | CellStep | CellEnd) -> None:
        nonlocal printed_at
        where = f"cell {event.number} of {total}, {event.cell.name}"
        if isinstance(event, CellStart):
            words = "starts"
        elif isinstance(event, CellEnd):
            reason = f": {event.reason}" if event.reason else ""
            words = f"{event.state} after {write_seconds(event.seconds)}{reason}"
        elif time.monotonic() - printed_at < _LINE_EVERY_SECONDS:
            return
        else:
            numbers = f"reward {write_number(event.reward)}  k3 {write_number(event.kl)}"
            words = f"step {event.step} of {event.cell.settings.steps}  {numbers}"
        printed_at = time.monotonic()
        console.print(f"{where}: {words}", soft_wrap=True, highlight=False)

    return show
