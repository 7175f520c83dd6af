"""KL divergence of every pair on one logarithmic line, with its interval."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from mismatch_probe.notation import write_estimate
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import hover_estimate, limit_line, logarithmic, panel, said, words_inside
from mismatch_probe.report.figures.theme import WIDE, color, dashes, symbol
from mismatch_probe.report.names import pair_label, pair_style
from mismatch_probe.report.tiles import KL_LIMIT, KL_LIMIT_NAME
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import Estimate

_ROW, _FRAME = 62, 90
"""Pixels of a pair's row, and of what is around the rows."""
_ROOM = 6.0


def draw(heading: Heading, pairs: Sequence[PairSummary], metric: str) -> Panel:
    """Pairs without a positive value of `metric` get their label and no mark."""
    shown = [(pair, pair.metrics[metric]) for pair in pairs if metric in pair.metrics]

    def on(figure: go.Figure) -> None:
        if not shown:
            return
        bounds = [bound for _, estimate in shown for bound in (estimate.value, estimate.low, estimate.high)]
        numbers = [KL_LIMIT, *(bound for bound in bounds if bound is not None and bound > 0)]
        left, right = min(numbers) / _ROOM, max(numbers) * _ROOM
        logarithmic(figure, "x")
        figure.update_xaxes(range=[math.log10(left), math.log10(right)], title_text=f"{metric}, nats per token")
        figure.update_yaxes(range=[len(shown) - 0.4, -0.75], showticklabels=False, showgrid=False, fixedrange=True)
        limit_line(figure, KL_LIMIT, upright=True)
        place = math.log(KL_LIMIT / left) / math.log(right / left)
        words_inside(figure, f"{KL_LIMIT_NAME} {KL_LIMIT:g}", place, 1.0, right=place > 0.5)
        for row, (pair, estimate) in enumerate(shown):
            _row(figure, row, pair, estimate, left)

    return panel(heading, on, max(WIDE, _FRAME + _ROW * len(shown)))


def _row(figure: go.Figure, row: int, pair: PairSummary, estimate: Estimate, left: float) -> None:
    style = pair_style(pair)
    label = said(f"{pair_label(pair)}   {write_estimate(estimate)}")
    figure.add_annotation(
        text=label,
        x=0,
        xref="paper",
        y=row - 0.32,
        showarrow=False,
        xanchor="left",
        font={"size": 12, "color": color("ink")},
    )
    if estimate.high is not None and estimate.high > 0:
        low = max(estimate.low or left, left)
        figure.add_scatter(
            x=[low, estimate.high],
            y=[row, row],
            mode="lines",
            line={"color": color(style.color), "width": 3},
            legendgroup=style.group,
            hoverinfo="skip",
        )
    value = estimate.value if estimate.value > 0 else None
    figure.add_scatter(
        x=[left, value],
        y=[row, row],
        mode="lines+markers",
        line={"color": color(style.color), "width": 1, "dash": dashes(style.dash)},
        marker={"symbol": symbol(style.marker), "size": [0, 10], "line": {"width": 0}},
        legendgroup=style.group,
        hovertext=["", hover_estimate(pair_label(pair), "", estimate, "nats per token")],
        hoverinfo="text",
    )
