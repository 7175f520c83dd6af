"""Deviation against how sure the reference is of the token."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import band, line, logarithmic, panel
from mismatch_probe.report.names import pair_style
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ConfidenceBin


def draw(heading: Heading, pairs: Sequence[PairSummary]) -> Panel:
    """Mean abs(d) with its interval in bins of the reference probability, drawn equally wide."""
    edges = sorted({edge for pair in pairs for one in pair.confidence for edge in (one.low, one.high)})

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
            bins = [one for one in pair.confidence if one.mean_abs_diff.value > 0]
            x = [float(edges.index(one.low)) for one in bins]
            y = [one.mean_abs_diff.value for one in bins]
            low = [max(one.mean_abs_diff.low or 0, one.mean_abs_diff.value / 10) for one in bins]
            high = [one.mean_abs_diff.high or one.mean_abs_diff.value for one in bins]
            band(axes, x, low, high, pair_style(pair), 0.22)
            line(axes, x, y, pair_style(pair))
        logarithmic(axes, "y")

    return panel(heading, on)


def bin_label(one: ConfidenceBin) -> str:
    return f"{one.low:g} to {one.high:g}"
