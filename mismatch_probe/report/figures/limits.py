"""Curves with their limits: guards and firings over steps, spans over layers and loss scales."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from mismatch_probe.inert import cut_text
from mismatch_probe.notation import write_number
from mismatch_probe.report.figures.canvas import (
    PlotValues,
    at_height,
    band,
    color,
    hover,
    inert_text,
    limit_line,
    line,
    logarithmic,
    panel,
    tint,
    titles,
    words_inside,
)
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Drawing, Heading, Panel

_TINT = 0.07
_POINTS = 25
_LEAST_REACH = 30.0
_ROOM = 0.06
_FAR = 20.0


class Limit(NamedTuple):
    """A value that a guard lets a metric reach from below, or from above, and the words on it."""

    value: float
    is_upper: bool
    words: str


class MovingLimit(NamedTuple):
    """The same where it differs from step to step; None at a step that had none."""

    steps: Sequence[float]
    values: Sequence[float | None]
    is_upper: bool
    words: str


def limits_in_reach(limits: Sequence[Limit], values: Sequence[float], *, logarithmic: bool) -> list[Limit]:
    """Those that can be drawn without squeezing the curve: no farther from `values` than these are spread."""
    low, high = _reach(values, logarithmic=logarithmic)
    return [limit for limit in limits if low <= limit.value <= high]


def moving_in_reach(limits: Sequence[MovingLimit], values: Sequence[float], *, logarithmic: bool) -> list[MovingLimit]:
    """Those that are in reach at some step, without the steps at which they are not."""
    low, high = _reach(values, logarithmic=logarithmic)
    limits_near = [
        limit._replace(values=[value if value is not None and low <= value <= high else None for value in limit.values])
        for limit in limits
    ]
    return [limit for limit in limits_near if any(value is not None for value in limit.values)]


def _reach(values: Sequence[float], *, logarithmic: bool) -> tuple[float, float]:
    """Between what a limit must lie to be drawn."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not logarithmic)]
    if not finite:
        return math.inf, -math.inf
    low, high = min(finite), max(finite)
    if logarithmic:
        reach = max(_LEAST_REACH, high / low)
        return low / reach, high * reach
    return low - (high - low), high + (high - low)


def draw_limits(figure: Drawing, limits: Sequence[Limit], last_step: int, *, logarithmic: bool) -> None:
    """A line across that can be pointed at anywhere, and a tint beyond it."""
    steps = np.linspace(1, max(last_step, 2), _POINTS).tolist()
    for limit in limits:
        if logarithmic:
            far_value = limit.value * (10.0**_FAR if limit.is_upper else 10.0**-_FAR)
        else:
            far_value = limit.value + (_FAR if limit.is_upper else -_FAR) * max(1.0, abs(limit.value))
        tint(figure, "y", limit.value, far_value, "reject", _TINT)
        figure.add_scatter(
            x=steps,
            y=[limit.value] * _POINTS,
            mode="lines",
            line={"color": color("reject"), "width": 1, "dash": "4px,3px"},
            hovertext=[inert_text(limit.words)] * _POINTS,
            hoverinfo="text",
        )


def draw_moving_limits(figure: Drawing, limits: Sequence[MovingLimit]) -> None:
    """A line of dots that goes along with the curve and says whose it is."""
    for limit in limits:
        figure.add_scatter(
            x=list(limit.steps),
            y=list(limit.values),
            mode="lines",
            line={"color": color("reject"), "width": 1.2, "dash": "1px,3px"},
            hovertext=[
                hover(f"step {step:g}: {write_number(value)}", limit.words)
                for step, value in zip(limit.steps, limit.values, strict=True)
            ],
            hoverinfo="text",
        )


def linear_range(values: Sequence[float], limits: Sequence[float]) -> tuple[float, float]:
    """What a linear axis shows: the tints reach farther."""
    finite_values = [value for value in (*values, *limits) if math.isfinite(value)]
    low, high = min(finite_values), max(finite_values)
    room = _ROOM * (high - low or abs(high) or 1.0)
    return low - room, high + room


Effect = Literal["reported", "changed", "stopped"]

_LOOKS: Final[dict[Effect, tuple[str, str]]] = {
    "reported": ("circle-open", "mask"),
    "changed": ("diamond", "reject"),
    "stopped": ("x", "reject"),
}
_FRAME, _ROW = 80, 30
_NAME_CHARACTERS = 28


class Mark(NamedTuple):
    """A firing: whose, when, what came of it, and what it says line by line."""

    guard: str
    step: int
    effect: Effect
    words: Sequence[str]


def draw_firings(heading: Heading, marks: Sequence[Mark], last_step: int) -> Panel:
    """Guards in the order in which they first fired, from the top."""
    guards = list(dict.fromkeys(mark.guard for mark in sorted(marks, key=lambda mark: mark.step)))

    def on(figure: Drawing) -> None:
        for effect, (symbol, role) in _LOOKS.items():
            of_effect = [mark for mark in marks if mark.effect == effect]
            if of_effect:
                figure.add_scatter(
                    x=[mark.step for mark in of_effect],
                    y=[guards.index(mark.guard) for mark in of_effect],
                    mode="markers",
                    marker={"symbol": symbol, "size": 11, "color": color(role), "line": {"width": 1.6}},
                    hovertext=[hover(f"{mark.guard}, step {mark.step}", *mark.words) for mark in of_effect],
                    hoverinfo="text",
                )
        margin = max(0.5, 0.02 * last_step)
        figure.update_axis("x", range=[1 - margin, last_step + margin], title={"text": "step"})
        figure.update_axis(
            "y",
            tickvals=list(range(len(guards))),
            ticktext=[inert_text(cut_text(guard, _NAME_CHARACTERS, keep="start")) for guard in guards],
            range=[len(guards) - 0.5, -0.5],
            fixedrange=True,
        )

    return panel(heading, on, _FRAME + _ROW * max(2, len(guards)))


_BAND_ALPHA, _SPAN_ALPHA = 0.18, 0.1
_HEAD = 0.97
_LEAST_RANGE = 10.0
"""At least a power of ten, so that noise does not look like a trend and ticks differ."""
_MOST_TICKS = 9


@dataclass(frozen=True)
class Series:
    """One curve; points without a value are left out. `low` and `high` bound its interval where it has one."""

    name: str
    x: Sequence[float]
    y: PlotValues
    style: PairStyle
    low: PlotValues = ()
    high: PlotValues = ()


@dataclass(frozen=True)
class Marks:
    """What is marked besides: a limit across, a stretch of the axis shaded, places upright, crosses at the top."""

    limit: tuple[float, str] | None = None
    span: tuple[float, float] | None = None
    places: Sequence[float] = ()
    crosses: Sequence[float] = ()


def draw(
    heading: Heading,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    marks: Marks = Marks(),
    write_x: Callable[[float], str] = "{:g}".format,
) -> Panel:
    """Curves on a logarithmic scale; what is not above 0 is left out."""

    def on(figure: Drawing) -> None:
        titles(figure, x_label, y_label)
        for curve in series:
            _draw_series(figure, curve, x_label, write_x)
        has_traces = bool(figure.traces)
        if has_traces or marks.crosses:
            _draw_marks(figure, marks)
            places = sorted({x for curve in series for x in curve.x})
            ticks = places[:: 1 + len(places) // _MOST_TICKS]
            figure.update_axis("x", tickvals=ticks, ticktext=[write_x(tick) for tick in ticks])
        if has_traces:
            limit = () if marks.limit is None else (marks.limit[0],)
            logarithmic(figure, "y", [*(value for curve in series for value in curve.y), *limit], _LEAST_RANGE)

    return panel(heading, on)


def _draw_series(figure: Drawing, series: Series, x_label: str, write_x: Callable[[float], str]) -> None:
    bounds = list(zip(series.low, series.high, strict=True)) or [(None, None)] * len(series.x)
    positive = [(low, high) if low is not None and low > 0 else (None, None) for low, high in bounds]
    band(figure, series.x, [low for low, _ in positive], [high for _, high in positive], series.style, _BAND_ALPHA)
    points = [
        (x, y, hover(series.name, f"{x_label} {write_x(x)}", _value_with_interval(y, *bound)))
        for x, y, bound in zip(series.x, series.y, bounds, strict=True)
        if y is not None and y > 0
    ]
    line(figure, [x for x, _, _ in points], [y for _, y, _ in points], series.style, [text for _, _, text in points])


def _value_with_interval(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return write_number(value)
    return f"{write_number(value)} [{write_number(low)}, {write_number(high)}]"


def _draw_marks(figure: Drawing, marks: Marks) -> None:
    if marks.span is not None:
        first, last = marks.span
        tint(figure, "x", first - 0.5, last + 0.5, "fp32", _SPAN_ALPHA)
    for place in marks.places:
        limit_line(figure, place, role="reject", upright=True)
    if marks.limit is not None:
        value, words = marks.limit
        limit_line(figure, value, role="reject")
        words_inside(figure, words, 0.0, 1.0)
    at_height(figure, marks.crosses, _HEAD, "x-thin-open", "reject")
