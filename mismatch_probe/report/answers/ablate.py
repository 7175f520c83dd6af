"""`ablate`: what each variant came to over its seeds, what came first, and what a format or a correction costs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from mismatch_probe.notation import (
    ABSENT,
    WrittenNumber,
    join_names,
    write_count,
    write_many,
    write_number,
    write_percent,
)
from mismatch_probe.records.ablation import (
    COLLAPSED_BELOW,
    AblationManifest,
    AblationResult,
    OverSeeds,
    VariantRatio,
    VariantResult,
)
from mismatch_probe.records.training_run import PASS_ACCURACY
from mismatch_probe.report.names import OTHER_COLORS, PairStyle
from mismatch_probe.report.sections.ablation import (
    CELL_BADGES,
    ablation_sections,
    cell_label,
    collapse_summary,
    seeds_mean,
    shared_time,
    variant_column,
    write_over_seeds,
)
from mismatch_probe.report.training.course import Course, setting_words
from mismatch_probe.report.training.dynamics import figure
from mismatch_probe.report.training.plots import OVERVIEW
from mismatch_probe.report.view import Answer, Badge, Cell, Column, Figure, Lines, Table

Courses = Sequence[tuple[str, Course]]
"""The run of each cell that has recorded a step, by its variant."""

_DASHES: Final[Sequence[tuple[float, ...]]] = ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))
_MARKERS: Final = "os^D"
_MOST_CURVES: Final = 8


def ablation_answer(result: AblationResult, manifest: AblationManifest | None = None, courses: Courses = ()) -> Answer:
    """`manifest` and `courses` are for a page: provenance, and the curves of the variants."""
    ratios = sorted(result.ratios, key=lambda ratio: bool(ratio.differs_in))
    remarks = [*map(_ratio_sentence, ratios)]
    return Answer(
        subject="ablation",
        model=", ".join(result.models),
        headline=_ablation_headline(result),
        badge=_worst_badge(result),
        facts=[
            result.task,
            write_many(len(result.cells), "cell"),
            f"intervals of {write_percent(result.level)} over seeds",
        ],
        table=_overview(result),
        footnote=_ablation_footnote(result),
        remarks=remarks,
        figure=_ablation_figure(courses),
        sections=[] if manifest is None else ablation_sections(result, manifest),
        screen=[
            _overview(result),
            Lines([*filter(None, [collapse_summary(result)]), *remarks, *_ending_sentences(result)]),
        ],
    )


def _worst_badge(result: AblationResult) -> Badge:
    states = {cell.state for cell in result.cells}
    worst = next(state for state in ("broken", "unfinished", "pending", "stopped", "finished") if state in states)
    return CELL_BADGES[worst]


def _ablation_headline(result: AblationResult) -> str:
    """How many cells ended how, and which variant has the least mismatch and which the most."""
    counts = {state: sum(cell.state == state for cell in result.cells) for state in CELL_BADGES}
    words = [f"{write_count(number)} {CELL_BADGES[state].words}" for state, number in counts.items() if number]
    num_collapsed = sum(variant.num_collapsed for variant in result.variants)
    endings = f"{write_many(len(result.cells), 'cell')}: {join_names(words)}"
    endings += f", {write_count(num_collapsed)} collapsed." if num_collapsed else ", none collapsed."
    levels = [(mean.value, variant.label) for variant in result.variants if (mean := variant.means.get("kl_all"))]
    if len(levels) < 2:
        return endings
    (least, lowest), (most, highest) = min(levels), max(levels)
    return (
        f"{endings} KL per token is lowest in {lowest} ({write_number(least)}) and highest in {highest} "
        f"({write_number(most)})."
    )


def _overview(result: AblationResult) -> Table:
    title = "train/infer" if all(set(variant.axes) == {"precision"} for variant in result.variants) else "variant"
    columns: list[Column[VariantResult]] = [
        variant_column(title),
        Column("cells", lambda variant: WrittenNumber(write_count(variant.num_done), f"of {variant.num_cells}")),
        Column("KL (k3)", seeds_mean("kl_all"), can_lack_interval=True),
        Column("accuracy", seeds_mean("accuracy_last"), can_lack_interval=True),
        Column("passed", lambda variant: _number_of(variant, variant.num_passed)),
        Column("collapsed", lambda variant: _number_of(variant, variant.num_collapsed)),
        Column("stopped", lambda variant: _number_of(variant, variant.num_stopped)),
        Column("s a step", seeds_mean("step_seconds"), can_lack_interval=True),
    ]
    return Table.of("Variants over their seeds", result.variants, columns, is_stacked=True)


def _number_of(variant: VariantResult, number: int) -> Cell:
    return ABSENT if not variant.num_done else write_count(number)


def _ablation_footnote(result: AblationResult) -> str:
    windows = sorted({cell.window for cell in result.cells if cell.window})
    steps = join_names([write_count(window) for window in windows]) if windows else "no"
    passes = (
        "a sanity test's own"
        if result.is_sanity
        else f"accuracy above {write_percent(PASS_ACCURACY)} over {steps} steps in a row"
    )
    return (
        f"Mean over seeds with Student's t interval of {write_percent(result.level)}: it says how far another choice "
        "of seeds would move the mean, and is wide with three. "
        f"KL: mean over all steps. Accuracy: share of responses with a reward of 1 or more, last {steps} steps. "
        f"Passed: {passes}. Collapsed: ends below {write_percent(COLLAPSED_BELOW)} of its best reward of three steps."
        + shared_time(result)
    )


def _times(ratio: OverSeeds) -> str:
    """`63 [14, 270] times`, or `92.7 times (one seed)`."""
    number = write_over_seeds(ratio)
    if isinstance(number, WrittenNumber) and not number.interval.startswith("["):
        return f"{number.value} times ({number.interval.strip('()')})"
    return f"{number} times"


def _ratio_sentence(ratio: VariantRatio) -> str:
    """The ratio of two variants' mismatch, and what it also compares where they do not learn alike."""
    if ratio.first is None or ratio.last is None:
        return f"No ratio of {ratio.of} to {ratio.over}: no seed has a KL above 0 in both."
    sentence = (
        f"KL per token of {ratio.of} is {_times(ratio.last)} that of {ratio.over} at the end, {_times(ratio.first)} at "
        "the start"
    )
    if not ratio.differs_in:
        return f"{sentence}."
    names = join_names(["LoRA" if name == "lora_rank" else setting_words(name) for name in ratio.differs_in])
    return f"{sentence}; they differ in {names}, so the ratio at the end also compares what each has learnt."


def _ending_sentences(result: AblationResult) -> list[str]:
    return [
        f"{cell_label(cell)} is {CELL_BADGES[cell.state].words}: {cell.reason}" for cell in result.cells if cell.reason
    ]


def _ablation_figure(courses: Courses) -> Figure | None:
    variants = _mean_courses(courses)
    if not variants:
        return None
    left_out = len({label for label, _ in courses}) - len(variants)
    caption = "each curve is the mean over a variant's seeds, as far as all of them go."
    if left_out:
        caption += f" The first {len(variants)} variants are drawn; {left_out} more are in the tables."
    return figure("overview", caption, OVERVIEW, variants)


def _mean_courses(courses: Courses) -> list[Course]:
    """One course a variant: each metric's mean over the seeds."""
    groups: dict[str, list[Course]] = {}
    for label, course in courses:
        groups.setdefault(label, []).append(course)
    names = [name for plot in OVERVIEW for name in plot.metrics]
    means = []
    for number, (label, group) in enumerate(list(groups.items())[:_MOST_CURVES]):
        length = min(len(course.steps) for course in group)
        style = PairStyle(OTHER_COLORS[number % len(OTHER_COLORS)], _DASHES[number % 4], _MARKERS[number % 4])
        metrics = {name: np.mean([course.metric(name)[:length] for course in group], axis=0) for name in names}
        means.append(
            replace(
                group[0],
                label=label,
                key=f"variant-{number + 1}",
                style=style,
                steps=group[0].steps[:length],
                metrics=metrics,
                firings=(),
            )
        )
    return means
