"""Curves over the layers of a model, over steps or over loss scales, with limits and spans marked on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mismatch_probe.notation import write_number
from mismatch_probe.report.figures.canvas import (
    Values,
    at_height,
    band,
    hover,
    limit_line,
    line,
    logarithmic,
    panel,
    tint,
    titles,
    words_inside,
)
from mismatch_probe.report.figures.drawing import Drawing
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel

_BAND_ALPHA, _SPAN_ALPHA = 0.18, 0.1
_HEAD = 0.97
_LEAST_RANGE = 10.0
"""At least a power of ten, so that noise does not look like a trend and ticks are told apart."""
_MOST_TICKS = 9


@dataclass(frozen=True)
class Series:
    """One curve; points without a value are left out. `low` and `high` bound its interval where it has one."""

    name: str
    x: Sequence[float]
    y: Values
    style: PairStyle
    low: Values = ()
    high: Values = ()


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
        drawn = bool(figure.traces)
        if drawn or marks.crosses:
            _draw_marks(figure, marks)
            places = sorted({x for curve in series for x in curve.x})
            ticks = places[:: 1 + len(places) // _MOST_TICKS]
            figure.update_axis("x", tickvals=ticks, ticktext=[write_x(tick) for tick in ticks])
        if drawn:
            limit = () if marks.limit is None else (marks.limit[0],)
            logarithmic(figure, "y", [*(value for curve in series for value in curve.y), *limit], _LEAST_RANGE)

    return panel(heading, on)


def _draw_series(figure: Drawing, series: Series, x_label: str, write_x: Callable[[float], str]) -> None:
    bounds = list(zip(series.low, series.high, strict=True)) or [(None, None)] * len(series.x)
    positive = [(low, high) if low is not None and low > 0 else (None, None) for low, high in bounds]
    band(figure, series.x, [low for low, _ in positive], [high for _, high in positive], series.style, _BAND_ALPHA)
    points = [
        (x, y, hover(series.name, f"{x_label} {write_x(x)}", _value(y, *bound)))
        for x, y, bound in zip(series.x, series.y, bounds, strict=True)
        if y is not None and y > 0
    ]
    line(figure, [x for x, _, _ in points], [y for _, y, _ in points], series.style, [text for _, _, text in points])


def _value(value: float, low: float | None, high: float | None) -> str:
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
