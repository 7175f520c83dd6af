"""A metric over the steps of training runs, with what happened to the runs marked on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mismatch_probe.notation import write_percent, write_seconds
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    SMALL,
    at_height,
    band,
    color,
    hover,
    inert_text,
    limit_line,
    line,
    logarithmic,
    panel,
    thin_line,
    titles,
)
from mismatch_probe.report.figures.limits import (
    Limit,
    MovingLimit,
    draw_limits,
    draw_moving_limits,
    limits_in_reach,
    linear_range,
    moving_in_reach,
)
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Drawing, Heading, Panel
from mismatch_probe.stats.sequences import Floats

MOST_POINTS = 240
"""Of a longer run, neighbouring means that share no step are drawn."""
_SMOOTHING = 7.0

AxisScale = Literal["linear", "log", "share"]

_BAND_ALPHA, _THIN_BAND_ALPHA = 0.2, 0.09
_SHARE_LIMITS = (-0.02, 1.04)
_FOOT, _HEAD = 0.02, 0.98
_FRAME, _PHASE, _BAR = 70, 8, 20
"""Pixels around the bars, between phases, and of a bar."""
_EACH_STEP = 7
_MANY = 1000.0
_ROOM_FOR_WORDS = 1.6


@dataclass(frozen=True)
class Curve:
    """Values [steps] of one metric of one run; a secondary metric is drawn thin."""

    name: str
    steps: Floats
    values: Floats
    style: PairStyle
    thin: bool = False


class Fired(NamedTuple):
    """A guard that fired: at which step, at which value of the metric, and its sentence."""

    step: int
    value: float
    words: str


class GuardChange(NamedTuple):
    """A step at which guards changed the run, and what they did, line by line."""

    step: int
    words: Sequence[str]


@dataclass(frozen=True)
class Events:
    """What happened to one run: the firings on the drawn metric, steps at which any guard changed the run, steps whose
    update was skipped because its gradients were not finite.
    """

    firings: Sequence[Fired] = ()
    changes: Sequence[GuardChange] = ()
    skipped: Sequence[float] = ()


class Smoothed(NamedTuple):
    """Mean and range of neighbouring steps at some of the steps; NaN where none of them has a finite value."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


def neighbours(num_steps: int) -> int:
    """How many steps a drawn point is the mean of: 3 of 60, 9 of 1,000."""
    return 1 + 2 * math.floor(math.sqrt(num_steps) / _SMOOTHING)


def smooth(steps: Floats, values: Floats) -> Smoothed:
    """Values [steps] as running means with their range; every step is in one."""
    width = neighbours(len(steps))
    every = 1 if len(steps) <= MOST_POINTS else width
    grid = np.unique(np.append(np.arange(0, len(steps), every), len(steps) - 1))
    padded_values = np.pad(values, width // 2, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded_values, width)[grid]
    finite = np.isfinite(windows)
    some = finite.any(axis=1)
    mean = np.full(len(windows), np.nan)
    mean[some] = np.where(finite, windows, 0.0).sum(axis=1)[some] / finite.sum(axis=1)[some]
    low = np.where(some, np.where(finite, windows, np.inf).min(axis=1), np.nan)
    high = np.where(some, np.where(finite, windows, -np.inf).max(axis=1), np.nan)
    return Smoothed(steps[grid], mean, low, high)


def draw(
    heading: Heading,
    curves: Sequence[Curve],
    events: Sequence[Events],
    y_label: str,
    scale: AxisScale,
    last_step: int,
    height: int,
    limits: Sequence[Limit] = (),
    moving: Sequence[MovingLimit] = (),
) -> Panel:
    """Curves over steps 1 to `last_step`: running means inside their range.

    Diamonds are firings on the metric, upright lines under triangles steps at which a guard changed the run, ticks at
    the foot skipped updates, crosses at the top values that are not finite, and circles at the foot of a logarithmic
    axis values that are not above 0. Beyond `limits` the drawing is tinted, where they are in reach; `moving` ones are
    dotted lines.
    """
    values = _values(curves, events)
    limits_shown = limits_in_reach(limits, values, logarithmic=scale == "log")
    bounds = [limit.value for limit in limits_shown]
    bounds += [value for limit in moving for value in limit.values if value is not None]

    def on(figure: Drawing) -> None:
        margin = max(0.5, 0.02 * last_step)
        figure.update_axis("x", range=[1 - margin, last_step + margin])
        if last_step <= _EACH_STEP:
            figure.update_axis("x", dtick=1)
        titles(figure, "step", y_label)
        for curve in curves:
            _draw_curve(figure, curve, y_label, above_zero=scale == "log")
        draw_limits(figure, limits_shown, last_step, logarithmic=scale == "log")
        draw_moving_limits(figure, moving)
        if scale == "log" and figure.traces:
            logarithmic(figure, "y", [*values, *bounds], LEAST_SPAN)
        elif scale == "share":
            figure.update_axis("y", range=_SHARE_LIMITS)
        elif bounds:
            figure.fit_axis("y", linear_range(values, bounds))
        if scale == "linear" and max(map(abs, filter(math.isfinite, values)), default=0.0) >= _MANY:
            figure.update_axis("y", exponentformat="SI")
        for event in events:
            _draw_events(figure, event)

    return panel(heading, on, height)


def moving_in_sight(
    moving: Sequence[MovingLimit], curves: Sequence[Curve], events: Sequence[Events], scale: AxisScale
) -> list[MovingLimit]:
    """Those that do not squeeze the curves."""
    return moving_in_reach(moving, _values(curves, events), logarithmic=scale == "log")


def _values(curves: Sequence[Curve], events: Sequence[Events]) -> list[float]:
    values = [value for curve in curves for value in curve.values.tolist()]
    return values + [firing.value for event in events for firing in event.firings]


def _draw_curve(figure: Drawing, curve: Curve, y_label: str, *, above_zero: bool) -> None:
    if not len(curve.steps):
        return
    heights = curve.values if not above_zero else np.where(curve.values > 0, curve.values, np.nan)
    points = smooth(curve.steps, heights)
    mean, low, high = map(_gaps, points[1:])
    if any(value is not None for value in mean):
        band(figure, points.steps.tolist(), low, high, curve.style, _THIN_BAND_ALPHA if curve.thin else _BAND_ALPHA)
        more = {"opacity": 0.75} if curve.thin else {}
        draw_line = thin_line if curve.thin else line
        draw_line(figure, points.steps.tolist(), mean, curve.style)
        figure.traces[-1].update(hoverinfo="all", hovertemplate=_hover_template(curve, y_label), **more)
    missing_steps = _steps_where(curve, ~np.isfinite(curve.values))
    at_height(
        figure, missing_steps, _HEAD, "x-thin-open", "reject", _each(curve.name, missing_steps, f"{y_label} not finite")
    )
    if above_zero:
        zeros = _steps_where(curve, curve.values <= 0)
        words = _each(curve.name, zeros, f"{y_label} not above 0")
        at_height(figure, zeros, _FOOT, "circle-open", curve.style.color, words)


def _each(name: str, steps: Sequence[float], what: str) -> list[str]:
    return [hover(name, f"step {step:g}", what) for step in steps]


def _hover_template(curve: Curve, y_label: str) -> str:
    """Plotly's template of what a point says; the names in it are no template."""
    name, label = (inert_text(text).replace("%{", "% {") for text in (curve.name, y_label))
    return f"{name}<br>step %{{x}}<br>{label} %{{y:.4g}}<extra></extra>"


def _gaps(column: Floats) -> list[float | None]:
    """NaN and infinities as gaps."""
    return [value if math.isfinite(value) else None for value in column.tolist()]


def _steps_where(curve: Curve, grid: npt.NDArray[np.bool_]) -> list[float]:
    steps: list[float] = curve.steps[grid].tolist()
    return steps


def _draw_events(figure: Drawing, events: Events) -> None:
    for change in events.changes:
        limit_line(figure, change.step, role="reject", upright=True)
    change_steps = [change.step for change in events.changes]
    words = [hover(f"step {change.step}", *change.words) for change in events.changes]
    at_height(figure, change_steps, 1.0, "triangle-down", "reject", words)
    skipped_steps = [hover(f"step {step:g}", "update skipped: gradients not finite") for step in events.skipped]
    at_height(figure, events.skipped, _FOOT, "line-ns-open", "mask", skipped_steps)
    if not events.firings:
        return
    figure.add_scatter(
        x=[firing.step for firing in events.firings],
        y=[firing.value for firing in events.firings],
        mode="markers",
        marker={"symbol": "diamond-open", "size": 9, "color": color("reject"), "line": {"width": 1.6}},
        hovertext=[hover(f"step {firing.step}", firing.words) for firing in events.firings],
        hoverinfo="text",
    )


def draw_phases(heading: Heading, runs: Sequence[tuple[PairStyle, Mapping[str, float], float]]) -> Panel:
    """Seconds of a step by phase, one bar for each run's style, seconds by phase and seconds of a whole step; the
    longest phase first.
    """
    phases = sorted({phase for _, seconds, _ in runs for phase in seconds}, key=lambda phase: -runs[0][1][phase])

    def on(figure: Drawing) -> None:
        for style, seconds, total in runs:
            words = [f"{write_seconds(seconds[phase])}, {write_percent(seconds[phase] / total)}" for phase in phases]
            figure.add_bar(
                orientation="h",
                x=[seconds[phase] for phase in phases],
                y=[inert_text(phase) for phase in phases],
                marker={"color": color(style.color)},
                text=words,
                textposition="outside",
                cliponaxis=False,
                hovertext=[hover(phase, text) for phase, text in zip(phases, words, strict=True)],
                hoverinfo="text",
                legendgroup=style.group,
            )
        longest = max(max(seconds.values()) for _, seconds, _ in runs)
        figure.update_axis("x", title={"text": "seconds"}, range=[0, _ROOM_FOR_WORDS * longest])
        figure.update_axis("y", autorange="reversed", showgrid=False, ticks="", fixedrange=True)
        figure.layout["barmode"] = "group"

    return panel(heading, on, max(SMALL, _FRAME + len(phases) * (_PHASE + _BAR * len(runs))))
