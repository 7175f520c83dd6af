"""Deviation against how sure the reference is of the token."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import band, line, logarithmic, panel
from mismatch_probe.report.names import pair_style
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ConfidenceBin

_WIDEST = 10.0
"""Times the value: the interval of a few tokens can reach over hundreds of powers of ten, and is drawn up to here."""


def draw(heading: Heading, pairs: Sequence[PairSummary]) -> Panel:
    """Mean abs(d) with its interval in bins of the reference probability, drawn equally wide."""
    edges = sorted({edge for pair in pairs for bin_ in pair.confidence for edge in (bin_.low, bin_.high)})

    def on(axes: Axes) -> None:
        axes.set_xticks(
            [number - 0.5 for number in range(len(edges))],
            [f"{edge:g}" for edge in edges],
            rotation=40,
            ha="right",
            rotation_mode="anchor",
        )
        axes.set_xlabel("reference probability of the sampled token")
        axes.set_ylabel("mean |d|, nats")
        for pair in pairs:
            bins = [bin_ for bin_ in pair.confidence if bin_.mean_abs_diff.value > 0]
            x = [float(edges.index(bin_.low)) for bin_ in bins]
            y = [bin_.mean_abs_diff.value for bin_ in bins]
            low = [max(bin_.mean_abs_diff.low or 0, bin_.mean_abs_diff.value / _WIDEST) for bin_ in bins]
            high = [
                min(bin_.mean_abs_diff.high or bin_.mean_abs_diff.value, bin_.mean_abs_diff.value * _WIDEST)
                for bin_ in bins
            ]
            band(axes, x, low, high, pair_style(pair), 0.22)
            line(axes, x, y, pair_style(pair))
        logarithmic(axes, "y")

    return panel(heading, on)


def bin_label(bin_: ConfidenceBin) -> str:
    return f"{bin_.low:g} to {bin_.high:g}"
