"""What guards held each step against where that moves with the run, by the rules themselves on the recorded metrics.

Curves over the steps, section by section, with the numbers behind them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.book import of_canary
from mismatch_probe.guards.rules import recorded_guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.report.figures import over_steps as drawing
from mismatch_probe.report.figures.canvas import SMALL, WIDE
from mismatch_probe.report.figures.limits import Limit, MovingLimit
from mismatch_probe.report.figures.over_steps import Curve, Events, Fired, GuardChange
from mismatch_probe.report.training.course import Course, Firing, actions_words, asked_words, limits_on
from mismatch_probe.report.training.headline import OVERFLOW, finite_mean, metric_course, phases, window_of
from mismatch_probe.report.training.plots import SECTIONS, TIME, Plot, PlotSection
from mismatch_probe.report.view import Block, Column, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.stats.sequences import Floats


def moving_limits_on(metric: str, course: Course) -> Iterator[MovingLimit]:
    """Of guards whose rule sets a step against earlier ones. One that this version does not know has none."""
    for table in course.manifest.guards:
        if table.get("metric") != metric:
            continue
        try:
            [settings] = recorded_guards([table], "the manifest")
        except UsageError:
            continue
        if settings.moving_bound is None:
            continue
        is_upper = settings.moving_bound == "upper"
        words = _guard_words(settings, "above" if is_upper else "below")
        yield MovingLimit(course.steps.tolist(), _bounds(settings, course), is_upper, words)


def _bounds(settings: GuardSettings, course: Course) -> list[float | None]:
    """Of each step; None where the guard had none. The first step is also the canary."""
    guard, columns = settings.start(), {name: course.metric(name) for name in settings.metrics}
    bounds: list[float | None] = []
    for row in range(len(course.steps)):
        values = {name: float(column[row]) for name, column in columns.items()}
        if math.isnan(values[settings.metrics[0]]):
            bounds.append(None)
            continue
        if row == 0 and of_canary(values) == values:
            guard.judge_canary(values)
        try:
            guard.judge(values)
        except UsageError:  # no canary measured what the guard is relative to
            return [None] * len(course.steps)
        bounds.append(guard.bound)
    return bounds


def _guard_words(settings: GuardSettings, side: str) -> str:
    window = settings.steps_of_a_value
    level = "" if window == 1 else f"with its median over {window} steps "
    actions = asked_words(settings.model_dump(mode="json")["actions"])
    return f"guard {settings.name}: {level}{side} this it asks to {actions}"


_ROWS = 10
_RATE = "optim/learning_rate"
_FAR_APART = 20.0
_MOVING = "Dotted across: what guards hold a step against, by the steps before it."


def dynamics(courses: Sequence[Course]) -> list[Section]:
    """A section for each group of drawings; what never changes has a sentence."""
    return [_dynamics_section(section, courses) for section in SECTIONS]


def figure(anchor: str, caption: str, plots: Sequence[Plot], courses: Sequence[Course], *extra: Panel) -> Figure:
    """Drawings of some metrics of every run that has them, in one figure."""
    names = [name for plot in plots for name in plot.metrics]
    dense = len(plots) + len(extra) > 2
    height = SMALL if dense else WIDE
    return Figure(
        f"figure-{anchor}",
        f"How to read it: {' '.join([caption, *_smoothing(courses)])}",
        [*(_dynamics_panel(plot, courses, height) for plot in plots), *extra],
        [_stretches_table(course, names) for course in courses],
        key=[(course.label, course.style) for course in courses],
        dense=dense,
    )


def _smoothing(courses: Sequence[Course]) -> list[str]:
    width = max(drawing.neighbours(len(course.steps)) for course in courses)
    return [f"Lines are means of {width} neighbouring steps, bands their range."] if width > 1 else []


def _dynamics_section(section: PlotSection, courses: Sequence[Course]) -> Section:
    present = [plot for plot in section.plots if any(course.has(name) for course in courses for name in plot.metrics)]
    constants = {plot: value for plot in present if (value := _constant(plot, courses)) is not None}
    moving = [plot for plot in present if plot not in constants]
    extra = phases(courses) if section.anchor == TIME else []
    blocks: list[Block] = []
    if moving or extra:
        blocks.append(figure(section.anchor, section.caption, moving, courses, *extra))
    if constants:
        words = [f"{plot.title}: {write_number(value)}" for plot, value in constants.items()]
        blocks.append(Note("The same in every step:", words))
    if not blocks:
        blocks.append(Note("No step recorded any of it."))
    return Section(section.anchor, section.title, section.lede, blocks)


def _constant(plot: Plot, courses: Sequence[Course]) -> float | None:
    """The one value that a drawing would show in every step of every run."""
    values = np.concatenate([course.metric(name) for course in courses for name in plot.metrics])
    return float(values[0]) if len(values) and (values == values[0]).all() else None


def _dynamics_panel(plot: Plot, courses: Sequence[Course], height: int) -> Panel:
    curves = [
        Curve(course.label, course.steps, course.metric(name), course.style, thin=name != plot.metrics[0])
        for course in courses
        for name in plot.metrics
        if course.has(name)
    ]
    plot = replace(plot, scale=_scale(plot, curves))
    events = [_events(plot, course) for course in courses]
    moving = drawing.moving_in_sight(_moving_limits(plot, courses), curves, events, plot.scale)
    legend = [*_legend(curves, plot), *([_MOVING] if moving else [])]
    heading = Heading(f"plot-{plot.anchor}", plot.title, _description(plot, courses), " ".join([plot.reading, *legend]))
    last = max((int(course.steps[-1]) for course in courses if len(course.steps)), default=1)
    limits = _limits(plot, courses)
    return drawing.draw(heading, curves, events, plot.y_label, plot.scale, last, height, limits, moving)


def _scale(plot: Plot, curves: Sequence[Curve]) -> drawing.AxisScale:
    """The drawing's own, but a logarithmic one of a rate that guards changed by much."""
    rates = [curve.values[curve.values > 0] for curve in curves] if plot.metrics == (_RATE,) else []
    positive = np.concatenate(rates) if rates else np.empty(0)
    return "log" if len(positive) and positive.max() > _FAR_APART * positive.min() else plot.scale


def _moving_limits(plot: Plot, courses: Sequence[Course]) -> list[MovingLimit]:
    """Only for a single run: each run has events of its own, and in one drawing nobody could distinguish them."""
    if len(courses) > 1:
        return []
    return [limit for name in plot.metrics for limit in moving_limits_on(name, courses[0])]


def _limits(plot: Plot, courses: Sequence[Course]) -> list[Limit]:
    """Of the metrics that are drawn, each once."""
    return list(
        dict.fromkeys(limit for course in courses for name in plot.metrics for limit in limits_on(name, course))
    )


def _events(plot: Plot, course: Course) -> Events:
    firings = [firing for firing in course.firings if firing.metric in plot.metrics]
    if plot.scale == "log":
        firings = [firing for firing in firings if firing.value > 0]
    skipped_steps = (
        course.steps[course.metric(OVERFLOW) > 0] if any(name.startswith("optim/") for name in plot.metrics) else ()
    )
    return Events(
        firings=[Fired(firing.step, firing.value, f"{firing.guard}: {firing.sentence}") for firing in firings],
        changes=_changes(course),
        skipped=list(skipped_steps),
    )


def _changes(course: Course) -> list[GuardChange]:
    changing = [firing for firing in course.firings if firing.changed_the_run]
    return [
        GuardChange(
            step,
            [f"{course.label}: {firing.guard} asked to {actions_words(firing.actions)}" for firing in firings],
        )
        for step, firings in groupby(sorted(changing, key=_step), key=_step)
    ]


def _step(firing: Firing) -> int:
    return firing.step


def _legend(curves: Sequence[Curve], plot: Plot) -> list[str]:
    """What the marks mean, where there are any."""
    entries = []
    if any(not np.isfinite(curve.values).all() for curve in curves):
        entries.append("Crosses at the top: not finite.")
    if plot.scale == "log" and any((curve.values <= 0).any() for curve in curves):
        entries.append("Circles at the foot: exactly 0.")
    return entries


def _description(plot: Plot, courses: Sequence[Course]) -> str:
    sentences = []
    for course in courses:
        values = course.metric(plot.metrics[0])
        metric = metric_course(course.steps, values, window_of(len(course.steps)))
        sentences.append(
            f"{course.label} goes from {write_number(metric.first)} to {write_number(metric.last)}, lowest "
            f"{write_number(metric.lowest)}, highest {write_number(metric.highest)}"
        )
    return "; ".join(sentences)


def _stretches_table(course: Course, names: Sequence[str]) -> Table:
    """Means over stretches of the run."""
    present = [name for name in names if course.has(name)]
    parts = np.array_split(np.arange(len(course.steps)), min(_ROWS, len(course.steps)) or 1)
    columns: list[Column[npt.NDArray[np.intp]]] = [
        Column("steps", lambda rows: _stretch(course.steps[rows])),
        *Column.each(present, str, lambda name, rows: _mean(course.metric(name)[rows])),
    ]
    return Table.of(f"{course.label}: means over stretches of steps", [rows for rows in parts if len(rows)], columns)


def _stretch(steps: Floats) -> str:
    first, last = write_count(int(steps[0])), write_count(int(steps[-1]))
    return first if first == last else f"{first} to {last}"


def _mean(values: Floats) -> str:
    unfinite = int((~np.isfinite(values)).sum())
    note = f" ({unfinite} of {len(values)} not finite)" if unfinite else ""
    return write_number(finite_mean(values)) + note
