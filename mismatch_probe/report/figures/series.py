"""Curves over the layers of a model, or over loss scales, with limits and spans marked on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mismatch_probe.report.figures.canvas import WIDE, band, color, line, logarithmic, panel, words_inside
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel

_BAND_ALPHA, _SPAN_ALPHA = 0.18, 0.1
_HEAD = 0.97
_LEAST_RANGE = 10.0


@dataclass(frozen=True)
class Series:
    """One curve; points without a value are left out. `low` and `high` bound its interval where it has one."""

    x: Sequence[float]
    y: Sequence[float | None]
    style: PairStyle
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


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
    size: tuple[float, float] = WIDE,
) -> Panel:
    """Curves on a logarithmic scale; what is not above 0 is left out."""

    def on(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write_x(value)))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        drawn = [_draw_series(axes, curve) for curve in series]
        if any(drawn) or marks.crosses:
            _draw_marks(axes, marks)
        if any(drawn):
            logarithmic(axes, "y")
            _widen(axes)

    return panel(heading, on, size)


def _widen(axes: Axes) -> None:
    """At least a power of ten, so that noise does not look like a trend and ticks are told apart."""
    low, high = axes.get_ylim()
    if high / low < _LEAST_RANGE:
        middle, half = math.sqrt(low * high), math.sqrt(_LEAST_RANGE)
        axes.set_ylim(middle / half, middle * half)


def _draw_series(axes: Axes, series: Series) -> bool:
    """Whether anything of it can be drawn."""
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None and y > 0]
    line(axes, [x for x, _ in points], [y for _, y in points], series.style)
    bounds = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low or (), series.high or (), strict=False)
        if low is not None and high is not None and low > 0
    ]
    x, low, high = ([bound[place] for bound in bounds] for place in range(3))
    band(axes, x, low, high, series.style, _BAND_ALPHA)
    return bool(points)


def _draw_marks(axes: Axes, marks: Marks) -> None:
    if marks.span is not None:
        axes.axvspan(marks.span[0] - 0.5, marks.span[1] + 0.5, color=color("fp32"), alpha=_SPAN_ALPHA, linewidth=0)
    for place in marks.places:
        axes.axvline(place, color=color("reject"), linewidth=0.9, alpha=0.7, linestyle=(0, (3, 2)), zorder=0)
    if marks.limit is not None:
        value, words = marks.limit
        axes.axhline(value, color=color("reject"), linewidth=1.1, linestyle=(0, (2, 3)), zorder=0)
        words_inside(axes, words, 0.0, 1.015)
    if marks.crosses:
        axes.plot(
            marks.crosses,
            np.full(len(marks.crosses), _HEAD),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="x",
            markersize=6,
            markeredgecolor=color("reject"),
            markeredgewidth=1.3,
        )
