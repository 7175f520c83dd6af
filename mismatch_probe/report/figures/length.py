"""Deviation against length: curves by position and by response length, and what they do to importance sampling."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from mismatch_probe.notation import write_token_tick
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import (
    NUM_HEAT_LEVELS,
    SMALL,
    band,
    big_marker,
    color,
    line,
    logarithmic,
    panel,
    words_inside,
)
from mismatch_probe.report.names import PairStyle, pair_style
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import AtLength, ConfidenceCurve, CurveBin, Estimate, LengthLaw

_BAND_ALPHA = 0.22
_SPREAD_ALPHA = 0.10
_FAINTEST_LINE = 4
FEWEST_RESPONSES = 8
_TOP = 1.04


def draw_size(heading: Heading, curves: Sequence[tuple[PairSummary, Sequence[CurveBin]]], x_label: str) -> Panel:
    """Mean abs(d) on two logarithmic axes: line the mean, dense band its interval, faint band p50 to p90."""

    def on(axes: Axes) -> None:
        axes.set_xlabel(x_label)
        axes.set_ylabel("|d|, nats")
        for pair, bins in curves:
            positive = [bin_ for bin_ in _solid(bins) if bin_.mean.value > 0]
            if not positive:
                continue
            style = pair_style(pair)
            x = [bin_.center for bin_ in positive]
            floor = min(bin_.mean.value for bin_ in positive) / 10
            p50, p90 = (
                [max(value, floor) for value in values]
                for values in zip(*((bin_.p50, bin_.p90) for bin_ in positive), strict=True)
            )
            band(axes, x, p50, p90, style, _SPREAD_ALPHA)
            band(axes, x, *_interval(positive, floor), style, _BAND_ALPHA)
            line(axes, x, [bin_.mean.value for bin_ in positive], style)
        logarithmic(axes, "x", write_token_tick)
        logarithmic(axes, "y")

    return panel(heading, on)


def draw_cumulative(heading: Heading, pairs: Sequence[tuple[PairSummary, LengthLaw]]) -> Panel:
    """Mean of S up to each position with its interval, and the fitted drift as a thin line."""

    def on(axes: Axes) -> None:
        axes.set_xlabel("position in the response, tokens")
        axes.set_ylabel("cumulative S, nats")
        axes.xaxis.set_major_formatter(lambda value, _: write_token_tick(value))
        for pair, law in pairs:
            bins = _solid(law.cumulative_diff_by_position)
            if not bins:
                continue
            style = pair_style(pair)
            x = [bin_.center for bin_ in bins]
            band(axes, x, *_interval(bins, -math.inf), style, _BAND_ALPHA)
            line(axes, x, [bin_.mean.value for bin_ in bins], style)
            if law.drift_per_1000 is not None:
                end = max(bin_.high for bin_ in bins)
                axes.plot([0, end], [0, law.drift_per_1000.value * end / 1000], color=color(style.color), linewidth=0.9)
        if axes.has_data():
            axes.axhline(0, color=color("muted"), linewidth=0.8, zorder=1.5)

    return panel(heading, on)


def draw_budget(heading: Heading, pairs: Sequence[tuple[PairSummary, LengthLaw]]) -> Panel:
    """The fitted law of ESS(T): solid where measured, dotted where extrapolated, marked at T*.

    Hollow marks with intervals are the ESS measured on the first T tokens. Every law given has a budget.
    """

    def on(axes: Axes) -> None:
        for pair, law in pairs:
            assert law.budget_tokens is not None
            style = pair_style(pair)
            lengths, shares = np.array([(point.num_tokens, point.ess) for point in law.fitted_ess]).T
            seen = int(np.searchsorted(lengths, law.measured_up_to, side="right"))
            axes.plot(lengths[:seen], shares[:seen], color=color(style.color))
            beyond = slice(max(seen - 1, 0), None)
            axes.plot(lengths[beyond], shares[beyond], color=color(style.color), linestyle=(0, (2, 2)), linewidth=1.2)
            _measured(axes, law.ess_by_length, style)
            big_marker(axes, law.budget_tokens.value, law.budget_ess, style)
        budget_ess = pairs[0][1].budget_ess
        axes.axhline(budget_ess, color=color("muted"), linewidth=1, linestyle=(0, (2, 3)))
        words_inside(axes, f"ESS {budget_ess:g}", 0.005, budget_ess / _TOP + 0.015)
        axes.set_ylim(0, _TOP)
        axes.set_xlabel("response length T, tokens")
        axes.set_ylabel("share of samples that count (ESS)")
        logarithmic(axes, "x", write_token_tick)

    return panel(heading, on)


def _measured(axes: Axes, points: Sequence[AtLength], style: PairStyle) -> None:
    lengths = [point.num_tokens for point in points]
    bounds = np.array([_bounds(point.estimate) for point in points]).reshape(-1, 2)
    gaps = np.full(len(points), np.nan)
    axes.plot(
        np.column_stack([lengths, lengths, gaps]).ravel(),
        np.column_stack([bounds, gaps]).ravel(),
        color=color(style.color),
        linewidth=0.9,
        alpha=0.6,
    )
    axes.plot(
        lengths,
        [point.estimate.value for point in points],
        color=color(style.color),
        linestyle="none",
        marker=style.marker,
        markerfacecolor="none",
        markeredgewidth=1,
    )


def _bounds(estimate: Estimate) -> tuple[float, float]:
    """The interval, or the value itself where there is none."""
    low, high = estimate.low, estimate.high
    return (estimate.value if low is None else low), (estimate.value if high is None else high)


def draw_by_confidence(heading: Heading, curves: Sequence[ConfidenceCurve]) -> Panel:
    """Mean abs(d) by position, one line a bin of confidence; the strongest line is the last bin."""

    def on(axes: Axes) -> None:
        for curve in curves:
            positive = [bin_ for bin_ in _solid(curve.abs_diff_by_position) if bin_.mean.value > 0]
            x, y = [bin_.center for bin_ in positive], [bin_.mean.value for bin_ in positive]
            line(axes, x, y, confidence_style(curve, curves))
        axes.set_xlabel("position in the response, tokens")
        axes.set_ylabel("mean |d|, nats")
        logarithmic(axes, "x", write_token_tick)
        logarithmic(axes, "y")

    return panel(heading, on, SMALL)


def confidence_style(curve: ConfidenceCurve, curves: Sequence[ConfidenceCurve]) -> PairStyle:
    """The higher the bin, the stronger the colour; dash and marker tell neighbours apart."""
    number = curves.index(curve)
    level = _FAINTEST_LINE + round((NUM_HEAT_LEVELS - _FAINTEST_LINE) * number / max(1, len(curves) - 1))
    return PairStyle(f"heat-{level}", ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))[number % 4], "os^D"[number % 4])


def _solid(bins: Sequence[CurveBin]) -> list[CurveBin]:
    """The bins that enough responses reach for a curve to mean something."""
    return [bin_ for bin_ in bins if bin_.mean.num_sequences >= FEWEST_RESPONSES]


def _interval(bins: Sequence[CurveBin], floor: float) -> tuple[list[float], list[float]]:
    bounds = [_bounds(bin_.mean) for bin_ in bins]
    return [max(low, floor) for low, _ in bounds], [max(high, floor) for _, high in bounds]
