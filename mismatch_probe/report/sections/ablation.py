"""The page of an ablation below its table: gaps, early warnings, corrections, speed, guards, cells, provenance."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from markupsafe import Markup

from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.notation import (
    ABSENT,
    WrittenNumber,
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_percent,
    write_seconds,
)
from mismatch_probe.records.ablation import (
    COLLAPSED_BELOW,
    FIRST_STEP_OF_GROWTH,
    GROWN_ABOVE,
    AblationManifest,
    AblationResult,
    CellResult,
    OverSeeds,
    VariantResult,
)
from mismatch_probe.records.training_run import GuardFirings
from mismatch_probe.report.names import visible
from mismatch_probe.report.sections.provenance import key_values
from mismatch_probe.report.training.course import actions_words, times
from mismatch_probe.report.view import Badge, Block, Cell, Column, Command, Note, Row, Section, Table
from mismatch_probe.stats.results import Estimate

_SHORTEST_WINDOW: Final = FIRST_STEP_OF_GROWTH - 1
_STEPS_OF_SHORTEST: Final = 5 * _SHORTEST_WINDOW
"""A window is a fifth of a run's steps."""

CELL_BADGES: Final = {
    "finished": Badge("clean", "finished"),
    "stopped": Badge("growing", "stopped by a guard"),
    "broken": Badge("broken", "broken"),
    "unfinished": Badge("undecided", "unfinished"),
    "pending": Badge("undecided", "not run"),
}


def seeds_mean(name: str) -> Callable[[VariantResult], Cell]:
    return lambda variant: write_over_seeds(variant.means.get(name))


def write_over_seeds(mean: OverSeeds | None) -> Cell:
    """A mean over seeds with its interval; of one seed the number alone."""
    if mean is None:
        return ABSENT
    if mean.low is None or mean.low == mean.high:
        return WrittenNumber(write_number(mean.value), "one seed" if mean.num_seeds == 1 else "in every seed")
    return write_estimate(
        Estimate(mean.value, mean.low, mean.high, 0.0, num_sequences=mean.num_seeds, num_tokens=0, by="sequence")
    )


def variant_column(title: str = "variant") -> Column[VariantResult]:
    return Column(title, lambda variant: variant.label)


def collapse_sentences(result: AblationResult) -> Iterator[str]:
    """Whether the mismatch grew before each collapse, and by how many steps."""
    for cell in result.cells:
        if cell.collapse_step is None:
            continue
        if cell.growth_step is None:
            order = f"its KL never was above {GROWN_ABOVE:g} times that of its first steps"
        elif cell.growth_step < cell.collapse_step:
            order = f"its KL had grown {write_many(cell.collapse_step - cell.growth_step, 'step')} before"
        elif cell.growth_step == cell.collapse_step:
            order = "its KL had grown at the same step"
        else:
            order = f"its KL had grown only at step {cell.growth_step}"
        yield f"{cell_label(cell)} collapsed at step {cell.collapse_step}: {order}."


def collapse_summary(result: AblationResult) -> str:
    """Of how many collapsed cells the mismatch had grown before, how many cells are too short to tell, and in how many
    a guard rolled back; nothing where there is none of these.
    """
    sentences = []
    collapses = [cell for cell in result.cells if cell.collapse_step is not None]
    if collapses:
        before = sum(cell.lead_steps is not None and cell.lead_steps > 0 for cell in collapses)
        cells = write_many(len(collapses), "cell")
        sentences.append(f"The mismatch had grown before the collapse in {before} of the {cells}.")
        too_fast = sum((cell.collapse_step or 0) <= FIRST_STEP_OF_GROWTH for cell in collapses)
        if too_fast:
            sentences.append(
                f"{write_many(too_fast, 'cell')} collapsed by step {FIRST_STEP_OF_GROWTH}, before which no growth can "
                "be seen."
            )
    too_short = sum(0 < cell.window < _SHORTEST_WINDOW for cell in result.cells)
    if too_short:
        cells = write_many(too_short, "cell")
        sentences.append(
            f"Neither collapse nor growth is looked for in {cells}: {_STEPS_OF_SHORTEST} steps are needed."
        )
    rollbacks = sum(any(ActionKind.ROLLBACK.value in guard.actions for guard in cell.guards) for cell in result.cells)
    if rollbacks:
        of_all = write_many(len(result.cells), "cell")
        sentences.append(f"A guard rolled back in {rollbacks} of {of_all}: what these show is the guards' doing too.")
    return " ".join(sentences)


def cell_label(cell: CellResult) -> str:
    return f"{cell.variant}, seed {cell.seed}"


def ablation_sections(result: AblationResult, manifest: AblationManifest) -> list[Section]:
    return [
        *_of_result(result),
        _origin(manifest),
        Section(
            "reproduce",
            "Reproduce",
            "The same command with the same versions on the same hardware gives the same numbers where the engine is "
            "deterministic. The second line runs one cell alone.",
            [
                Command(shlex.join(result.command)),
                Command(f"mismatch-probe {'sanity' if result.is_sanity else 'train'} --config settings/CELL.yaml"),
            ],
        ),
    ]


def ablation_tables(result: AblationResult) -> list[Table]:
    """Those of the page below its first one."""
    return [block for section in _of_result(result) for block in section.blocks if isinstance(block, Table)]


def _of_result(result: AblationResult) -> list[Section]:
    return [
        _deployment(result),
        _early_warning(result),
        _corrections(result),
        _speed(result),
        _guards(result),
        _cells(result),
    ]


def _without_empty_columns(caption: str, rows: Sequence[Row], columns: Sequence[Column[Row]], **how: Any) -> Table:
    """A table of the columns in which some row has a value."""
    present = [column for column in columns if any(column.cell(row) != ABSENT for row in rows)]
    return Table.of(caption, rows, present, **how)


def _deployment(result: AblationResult) -> Section:
    columns: list[Column[VariantResult]] = [
        variant_column(),
        Column("reward under mu", seeds_mean("reward_last")),
        Column("under pi", seeds_mean("reward_pi_last")),
        Column("gap", seeds_mean("reward_gap")),
        Column("accuracy under mu", seeds_mean("accuracy_last")),
        Column("accuracy under pi", seeds_mean("accuracy_pi_last")),
        Column("accuracy gap", seeds_mean("accuracy_gap")),
    ]
    return Section(
        "deployment",
        "Deployment gap",
        "The engine mu is what is deployed, pi is what was trained. Under pi each response of the last steps counts by "
        "its weight exp(S), so both are of the same responses. A gap above 0: the engine earns more.",
        [_without_empty_columns("Reward and accuracy under mu and pi", result.variants, columns, is_stacked=True)],
    )


def _early_warning(result: AblationResult) -> Section:
    columns: list[Column[CellResult]] = [
        Column("cell", cell_label),
        Column("mismatch grown at step", lambda cell: _step_cell(cell.growth_step)),
        Column("collapsed at step", lambda cell: _step_cell(cell.collapse_step)),
        Column("steps before", lambda cell: _step_cell(cell.lead_steps)),
        Column("first guard", _first_guard, is_text=True),
        Column("least pi − mu", lambda cell: _extreme(cell.prob_diff_lowest, cell.prob_diff_lowest_step)),
        Column("greatest pi − mu", lambda cell: _extreme(cell.prob_diff_highest, cell.prob_diff_highest_step)),
        Column("KL at the start", lambda cell: write_number(cell.kl_first)),
        Column("KL at the end", lambda cell: write_number(cell.kl_last)),
    ]
    sentences = list(collapse_sentences(result))
    none = "" if sentences else "No cell collapsed."
    blocks: list[Block] = [Note(" ".join(filter(None, [none, collapse_summary(result)])), sentences)]
    cells = [cell for cell in result.cells if cell.kl_first is not None]
    if cells:
        blocks.append(_without_empty_columns("Mismatch and collapse of each cell", cells, columns, is_stacked=True))
    return Section(
        "early-warning",
        "Does the mismatch grow before a collapse?",
        f"Grown: the median KL of three steps is above {GROWN_ABOVE:g} times that of the first three. Collapsed: the "
        f"run ends below {write_percent(COLLAPSED_BELOW)} of its best reward, and this step is the first that low, by "
        "means of three steps.",
        blocks,
    )


def _step_cell(number: int | None) -> str:
    return ABSENT if number is None else write_count(number)


def _extreme(value: float | None, step: int | None) -> Cell:
    return ABSENT if value is None else WrittenNumber(write_number(value), f"step {step}")


def _first_guard(cell: CellResult) -> Cell:
    if not cell.guards:
        return "silent"
    return f"{visible(cell.guards[0].guard)} at step {cell.guards[0].first_step}"


def _corrections(result: AblationResult) -> Section:
    columns: list[Column[VariantResult]] = [
        variant_column(),
        Column("reward at the end", seeds_mean("reward_last")),
        Column("best reward", seeds_mean("reward_best")),
        Column("passed at step", seeds_mean("pass_step")),
        Column("clipped", seeds_mean("clipped_share")),
        Column("rejected", seeds_mean("rejected_share")),
        Column("effective sample size", seeds_mean("effective_share")),
        Column("s a step", seeds_mean("step_seconds")),
        Column("of it scoring", seeds_mean("score_seconds")),
        Column("scoring over learning", seeds_mean("score_over_learn")),
    ]
    return Section(
        "corrections",
        "What each rule learns, and what it costs",
        "Scoring is pi's forward pass before the update, which a correction needs. With one update a step and one "
        "micro-batch it is the pass that is learned from, and a correction costs nothing; with several updates it is "
        "one more pass. Passed at step: over the seeds that passed.",
        [_without_empty_columns("Objectives and corrections", result.variants, columns, is_stacked=True)],
    )


def shared_time(result: AblationResult) -> str:
    """A remark on every time of an ablation whose cells ran side by side; empty where they did not."""
    if result.most_at_once == 1:
        return ""
    cells = write_many(result.most_at_once, "cell")
    return f" Up to {cells} ran at a time and took time from each other, so no times here compare formats or rules."


def _speed(result: AblationResult) -> Section:
    columns: list[Column[VariantResult]] = [
        variant_column(),
        Column("sampled", seeds_mean("sampled_tokens_per_second")),
        Column("scored", seeds_mean("scored_tokens_per_second")),
        Column("learned from", seeds_mean("learned_tokens_per_second")),
        Column("s a step", seeds_mean("step_seconds")),
    ]
    return Section(
        "speed",
        "Tokens per second by format",
        "Median over the steps of a cell, on this machine, with whatever else it had to do." + shared_time(result),
        [_without_empty_columns("Response tokens per second", result.variants, columns, is_stacked=True)],
    )


def _guards(result: AblationResult) -> Section:
    firings = [(cell, guard) for cell in result.cells for guard in cell.guards]
    columns: list[Column[tuple[CellResult, GuardFirings]]] = [
        Column("cell", lambda row: cell_label(row[0])),
        Column("guard", lambda row: visible(row[1].guard), is_text=True),
        Column("first step", lambda row: write_count(row[1].first_step)),
        Column("fired", lambda row: times(row[1].firings)),
        Column("what it saw", lambda row: row[1].sentence, is_text=True),
        Column("what it asked for", lambda row: actions_words(row[1].actions), is_text=True),
    ]
    blocks: list[Block] = [Note("No guard fired in any cell.")]
    if firings:
        blocks = [_without_empty_columns("Guards that fired", firings, columns, is_stacked=True)]
    return Section("guards", "Which guard spoke when", "Of each guard the first time, and how often.", blocks)


def _cells(result: AblationResult) -> Section:
    columns: list[Column[CellResult]] = [
        Column("cell", _cell_link),
        Column("state", lambda cell: CELL_BADGES[cell.state], is_text=True),
        Column("steps", lambda cell: WrittenNumber(write_count(cell.steps), f"of {write_count(cell.steps_asked)}")),
        Column("reward", lambda cell: _reward_course(cell.reward_first, cell.reward_last)),
        Column("accuracy", lambda cell: write_number(cell.accuracy_last)),
        Column("KL (k3)", lambda cell: write_number(cell.kl_all)),
        Column("passed at step", lambda cell: _step_cell(cell.pass_step)),
        Column("skipped", lambda cell: write_count(cell.skipped_updates)),
        Column("took", lambda cell: ABSENT if cell.seconds is None else write_seconds(cell.seconds)),
        Column("why", lambda cell: ABSENT if cell.reason is None else cell.reason, is_text=True),
    ]
    return Section(
        "cells",
        "Cells",
        "Each is a training run in its own folder below cells/, with a page of its own.",
        [_without_empty_columns("One row a cell", result.cells, columns, is_stacked=True)],
    )


def _cell_link(cell: CellResult) -> Cell:
    if not cell.steps:
        return cell_label(cell)
    return Markup('<a href="cells/{}/report.html">{}</a>').format(quote(cell.name), cell_label(cell))


def _reward_course(first: float | None, last: float | None) -> Cell:
    return ABSENT if last is None else WrittenNumber(write_number(last), f"from {write_number(first)}")


def _origin(manifest: AblationManifest) -> Section:
    return Section(
        "provenance",
        "Provenance",
        f"Started {manifest.created_at}; mismatch-probe {manifest.tool_version}.",
        [
            key_values("Versions", manifest.versions, is_folded=True),
            key_values("Hardware", manifest.hardware, is_folded=True),
            key_values("Git", manifest.git or {}, is_folded=True),
            key_values("Settings and grid", manifest.settings, is_folded=True),
        ],
    )
