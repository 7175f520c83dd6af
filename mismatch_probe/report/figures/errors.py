"""How far each side is from the reference: two histograms over powers of ten."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mismatch_probe.report.figures.canvas import SMALL, color, panel, power_of_ten
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ErrorHistogram

_TAIL_SHARE = 1e-3


def draw(
    heading: Heading, histograms: Sequence[ErrorHistogram], style: PairStyle, limits: tuple[float, float]
) -> Panel:
    """pi filled, mu outlined, as shares of all tokens; all pairs of a page share the `limits` of log10 abs(error)."""

    def on(axes: Axes) -> None:
        axes.set_xlim(*limits)
        axes.set_xlabel("abs(error) of the log-probability, nats")
        axes.set_ylabel("share of tokens")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(lambda exponent, _: power_of_ten(10.0**exponent))
        for histogram in histograms:
            total = sum(histogram.counts) + histogram.zeros
            shares = [count / max(1, total) for count in histogram.counts]
            if histogram.side == "pi":
                axes.stairs(shares, histogram.edges_log10, fill=True, color=color(style.color), alpha=0.35, linewidth=0)
            else:
                axes.stairs(shares, histogram.edges_log10, color=color("ink"), linewidth=1.4, linestyle=(0, (4, 1.5)))
        axes.set_ylim(bottom=0)

    return panel(heading, on, SMALL)


def shared_limits(histograms: Sequence[ErrorHistogram]) -> tuple[float, float]:
    """The range of log10 abs(error) over all histograms, without the tails that hold next to no tokens."""
    edges = [
        edge
        for histogram in histograms
        for left, right, count in zip(
            histogram.edges_log10[:-1], histogram.edges_log10[1:], histogram.counts, strict=True
        )
        if count > _TAIL_SHARE * sum(histogram.counts)
        for edge in (left, right)
    ]
    return (min(edges), max(edges)) if edges else (-8.0, 0.0)
