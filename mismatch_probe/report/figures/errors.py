"""How far each side is from the reference: two histograms over powers of ten."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from mismatch_probe.notation import write_number, write_share
from mismatch_probe.report.figures.canvas import hover, panel, power_of_ten, titles
from mismatch_probe.report.figures.theme import SMALL, color
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ErrorHistogram

_TAIL_SHARE = 1e-3
_FILL_ALPHA = 0.35


def draw(
    heading: Heading, histograms: Sequence[ErrorHistogram], style: PairStyle, limits: tuple[float, float]
) -> Panel:
    """pi filled, mu outlined, as shares of all tokens; all pairs of a page share the `limits` of log10 abs(error)."""

    def on(figure: go.Figure) -> None:
        titles(figure, "abs(error), nats", "share of tokens")
        exponents = range(math.ceil(limits[0]), math.floor(limits[1]) + 1)
        figure.update_xaxes(
            range=list(limits),
            tickvals=list(exponents),
            ticktext=[power_of_ten(10.0**exponent) for exponent in exponents],
        )
        figure.update_yaxes(rangemode="tozero")
        for histogram in histograms:
            _steps(figure, histogram, style)

    return panel(heading, on, SMALL)


def _steps(figure: go.Figure, histogram: ErrorHistogram, style: PairStyle) -> None:
    total = sum(histogram.counts) + histogram.zeros
    is_pi = histogram.side == "pi"
    name = "training path (pi)" if is_pi else "inference engine (mu)"
    bins = list(zip(histogram.edges_log10[:-1], histogram.edges_log10[1:], histogram.counts, strict=True))
    texts = [
        hover(
            name,
            f"{write_number(10**left)} to {write_number(10**right)} nats",
            f"{write_share(count, total)} of the tokens",
        )
        for left, right, count in bins
    ]
    middles = [(left + right) / 2 for left, right, _ in bins]
    shares = [count / max(1, total) for _, _, count in bins]
    said = {"legendgroup": style.group, "hovertext": texts, "hoverinfo": "text"}
    if is_pi:
        widths = [right - left for left, right, _ in bins]
        figure.add_bar(x=middles, y=shares, width=widths, marker_color=color(style.color), opacity=_FILL_ALPHA, **said)
    else:
        outline = {"shape": "hvh", "color": color("ink"), "width": 1.4, "dash": "4px,2px"}
        figure.add_scatter(x=middles, y=shares, mode="lines", line=outline, **said)


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
