"""Deviation against how sure the reference is of the token."""

from collections.abc import Sequence

import plotly.graph_objects as go

from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import LEAST_SPAN, band, hover_estimate, line, logarithmic, panel, titles
from mismatch_probe.report.names import pair_label, pair_style
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ConfidenceBin

_BAND_ALPHA = 0.22


def draw(heading: Heading, pairs: Sequence[PairSummary]) -> Panel:
    """Mean abs(d) with its interval in bins of the reference probability, drawn equally wide."""
    edges = sorted({edge for pair in pairs for bin_ in pair.confidence for edge in (bin_.low, bin_.high)})

    def on(figure: go.Figure) -> None:
        titles(figure, "reference probability of the sampled token", "mean |d|, nats")
        for pair in pairs:
            bins = [bin_ for bin_ in pair.confidence if bin_.mean_abs_diff.value > 0]
            x = [float(edges.index(bin_.low)) for bin_ in bins]
            low, high = ([getattr(bin_.mean_abs_diff, end) for bin_ in bins] for end in ("low", "high"))
            style, name = pair_style(pair), pair_label(pair)
            band(figure, x, low, high, style, _BAND_ALPHA)
            texts = [hover_estimate(name, bin_label(bin_), bin_.mean_abs_diff, "nats") for bin_ in bins]
            line(figure, x, [bin_.mean_abs_diff.value for bin_ in bins], style, texts)
        if not figure.data:
            return
        figure.update_xaxes(
            tickvals=[number - 0.5 for number in range(len(edges))],
            ticktext=[f"{edge:g}" for edge in edges],
            tickangle=-40,
        )
        logarithmic(figure, "y", [bin_.mean_abs_diff.value for pair in pairs for bin_ in pair.confidence], LEAST_SPAN)

    return panel(heading, on)


def bin_label(bin_: ConfidenceBin) -> str:
    return f"{bin_.low:g} to {bin_.high:g}"
