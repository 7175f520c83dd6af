"""Shares with their intervals, one row each, best first."""

from collections.abc import Sequence

import plotly.graph_objects as go

from mismatch_probe.notation import write_percent
from mismatch_probe.report.figures.canvas import hover, marks, panel, said
from mismatch_probe.report.figures.theme import WIDE, color
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import Estimate

_ROW, _FRAME = 44, 70
"""Pixels of a row, and of what is around the rows."""


def draw_shares(heading: Heading, rows: Sequence[tuple[str, Estimate, PairStyle]]) -> Panel:
    """A label, a share of 1 with its interval, and whose it is, in each row."""

    def on(figure: go.Figure) -> None:
        figure.update_yaxes(range=[len(rows) - 0.4, -0.75], showticklabels=False, showgrid=False, fixedrange=True)
        figure.update_xaxes(title_text="share of the token KL that it removes", tickformat=".0%", zeroline=True)
        figure.update_xaxes(zerolinecolor=color("muted"))
        for row, (label, share, style) in enumerate(rows):
            figure.add_annotation(
                text=said(label),
                x=0.01,
                xref="paper",
                y=row - 0.32,
                showarrow=False,
                xanchor="left",
                font={"size": 11, "color": color("ink")},
            )
            if share.low is not None and share.high is not None:
                figure.add_scatter(
                    x=[share.low, share.high],
                    y=[row, row],
                    mode="lines",
                    line={"color": color(style.color), "width": 3},
                    opacity=0.6,
                    legendgroup=style.group,
                    hoverinfo="skip",
                )
            marks(figure, [share.value], [row], style, [hover(label, _interval(share))])

    return panel(heading, on, max(WIDE, _FRAME + _ROW * len(rows)))


def _interval(share: Estimate) -> str:
    if share.low is None or share.high is None:
        return write_percent(share.value)
    return f"{write_percent(share.low)} to {write_percent(share.high)}"
