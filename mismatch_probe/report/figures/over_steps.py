"""A metric over the steps of training runs, with what happened to the runs marked on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mismatch_probe.notation import write_percent, write_seconds
from mismatch_probe.report.figures.canvas import SMALL, band, color, line, logarithmic, panel
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.sequences import Floats

MOST_POINTS = 240
"""Of a longer run, neighbouring means that share no step are drawn."""
_SMOOTHING = 7.0

Scale = Literal["linear", "log", "share"]

_BAND_ALPHA, _THIN_BAND_ALPHA = 0.2, 0.09
_SHARE_LIMITS = (-0.02, 1.04)
_FOOT, _HEAD = 0.02, 0.98
_PHASE_NAME, _BAR = 0.34, 0.26
"""Inches of height."""
_ROOM_FOR_WORDS = 1.6


@dataclass(frozen=True)
class Curve:
    """Values [steps] of one metric of one run; a secondary metric is drawn thin."""

    steps: Floats
    values: Floats
    style: PairStyle
    thin: bool = False


@dataclass(frozen=True)
class Events:
    """What happened to one run: step and value of each firing on the drawn metric, steps at which any guard changed the
    run, steps whose update was skipped because its gradients were not finite.
    """

    firings: Sequence[tuple[float, float]] = ()
    changes: Sequence[float] = ()
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


def smoothed(steps: Floats, values: Floats) -> Smoothed:
    """Values [steps] as running means with their range; every step is in one."""
    width = neighbours(len(steps))
    every = 1 if len(steps) <= MOST_POINTS else width
    chosen = np.unique(np.append(np.arange(0, len(steps), every), len(steps) - 1))
    padded = np.pad(values, width // 2, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)[chosen]
    known = np.isfinite(windows)
    some = known.any(axis=1)
    mean = np.full(len(windows), np.nan)
    mean[some] = np.where(known, windows, 0.0).sum(axis=1)[some] / known.sum(axis=1)[some]
    low = np.where(some, np.where(known, windows, np.inf).min(axis=1), np.nan)
    high = np.where(some, np.where(known, windows, -np.inf).max(axis=1), np.nan)
    return Smoothed(steps[chosen], mean, low, high)


def draw(
    heading: Heading,
    curves: Sequence[Curve],
    events: Sequence[Events],
    y_label: str,
    scale: Scale,
    last_step: int,
    size: tuple[float, float],
) -> Panel:
    """Curves over steps 1 to `last_step`: running means inside their range.

    Diamonds are firings on the metric, upright lines steps at which a guard changed the run, ticks at the foot skipped
    updates, crosses at the top values that are not finite, and circles at the foot of a logarithmic axis values that
    are not above 0.
    """

    def on(axes: Axes) -> None:
        margin = max(0.5, 0.02 * last_step)
        axes.set_xlim(1 - margin, last_step + margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel(y_label)
        drawn = [_draw_curve(axes, curve, logarithmic=scale == "log") for curve in curves]
        if scale == "log" and any(drawn):
            logarithmic(axes, "y")
        if scale == "linear":
            axes.ticklabel_format(axis="y", useOffset=False)
        if scale == "share":
            axes.set_ylim(*_SHARE_LIMITS)
        for event in events:
            _draw_events(axes, event)

    return panel(heading, on, size)


def _draw_curve(axes: Axes, curve: Curve, *, logarithmic: bool) -> bool:
    """Whether anything of it can be drawn."""
    if not len(curve.steps):
        return False
    shown = curve.values if not logarithmic else np.where(curve.values > 0, curve.values, np.nan)
    points = smoothed(curve.steps, shown)
    x = points.steps.tolist()
    band(
        axes, x, points.low.tolist(), points.high.tolist(), curve.style, _THIN_BAND_ALPHA if curve.thin else _BAND_ALPHA
    )
    if curve.thin:
        axes.plot(x, points.mean, color=color(curve.style.color), linewidth=0.9, alpha=0.75)
    else:
        line(axes, x, points.mean.tolist(), curve.style)
    _row(axes, curve.steps[~np.isfinite(curve.values)], _HEAD, "x", "reject")
    if logarithmic:
        _row(axes, curve.steps[curve.values <= 0], _FOOT, "o", curve.style.color)
    return bool(np.isfinite(points.mean).any())


def _draw_events(axes: Axes, events: Events) -> None:
    for step in events.changes:
        axes.axvline(step, color=color("reject"), linewidth=0.9, alpha=0.6, linestyle=(0, (3, 2)), zorder=0)
    _row(axes, np.array(events.skipped, dtype=float), _FOOT, "|", "mask")
    if not events.firings:
        return
    axes.plot(
        [step for step, _ in events.firings],
        [value for _, value in events.firings],
        linestyle="none",
        marker="D",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=color("reject"),
        markeredgewidth=1.4,
        zorder=3,
    )


def _row(axes: Axes, steps: Floats, height: float, marker: str, role: str) -> None:
    """Marks at one height of the axes, whatever their scale."""
    if not len(steps):
        return
    axes.plot(
        steps,
        np.full(len(steps), height),
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker=marker,
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=color(role),
        markeredgewidth=1.3,
        clip_on=False,
    )


def draw_phases(heading: Heading, runs: Sequence[tuple[PairStyle, Mapping[str, float], float]]) -> Panel:
    """Seconds of a step by phase, one bar for each run's style, seconds by phase and seconds of a whole step; the
    longest phase first.
    """
    phases = sorted({phase for _, seconds, _ in runs for phase in seconds}, key=lambda phase: -runs[0][1][phase])
    height = _PHASE_NAME + len(runs) * _BAR

    def on(axes: Axes) -> None:
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        axes.set_xlim(0, _ROOM_FOR_WORDS * max(max(seconds.values()) for _, seconds, _ in runs))
        axes.set_ylim(len(phases) * height, 0)
        for row, phase in enumerate(phases):
            axes.text(0, row * height + 0.75 * _PHASE_NAME, phase, transform=axes.get_yaxis_transform())
            for number, (style, seconds, whole) in enumerate(runs):
                middle = row * height + _PHASE_NAME + (number + 0.5) * _BAR
                axes.barh(middle, seconds[phase], height=0.8 * _BAR, color=color(style.color), linewidth=0)
                words = f"{write_seconds(seconds[phase])}, {write_percent(seconds[phase] / whole)}"
                axes.annotate(
                    words,
                    (seconds[phase], middle),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    color=color("muted"),
                )

    return panel(heading, on, (SMALL[0], max(SMALL[1], 0.8 + len(phases) * height)))
