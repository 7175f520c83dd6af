"""Token probabilities under the two policies as a map of counts: the diagonal is agreement."""

import math
from collections import defaultdict
from collections.abc import Sequence

import plotly.graph_objects as go

from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.summary import TokenInContext
from mismatch_probe.report.figures.canvas import hover, panel, titles
from mismatch_probe.report.figures.theme import NUM_HEAT_LEVELS, SMALL, color
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ProbabilityScatter

MOST_BINS = 64
_HEIGHT = SMALL + 60
_POINTED = 24
_CONTEXT = 40

Cells = dict[tuple[int, int], int]


def draw(
    heading: Heading,
    scatter: ProbabilityScatter,
    most_bins: int = MOST_BINS,
    worst: Sequence[tuple[TokenInContext, str]] = (),
) -> Panel:
    """Darker cells hold more tokens, on a logarithmic scale. The worst tokens are points, each with the anchor of its
    row in the table.
    """
    num_bins, cells = coarser(scatter, most_bins)

    def on(figure: go.Figure) -> None:
        titles(figure, "probability under mu (inference)", "probability under pi (training)")
        figure.update_xaxes(range=[0, 1], constrain="domain")
        figure.update_yaxes(range=[0, 1], scaleanchor="x", constrain="domain")
        if cells:
            _map(figure, num_bins, cells)
        ends = {"x": [0, 1], "y": [0, 1], "mode": "lines", "hoverinfo": "skip"}
        figure.add_scatter(**ends, line={"color": color("muted"), "width": 1, "dash": "3px,3px"})
        if worst:
            _points(figure, worst[:_POINTED])

    return panel(heading, on, _HEIGHT)


def coarser(scatter: ProbabilityScatter, most_bins: int = MOST_BINS) -> tuple[int, Cells]:
    """Bins and counts, with neighbouring bins joined until the map has at most `most_bins` a side."""
    factor = math.ceil(scatter.num_bins / most_bins)
    cells: Cells = defaultdict(int)
    for x, y, count in scatter.cells:
        cells[x // factor, y // factor] += count
    return math.ceil(scatter.num_bins / factor), cells


def _map(figure: go.Figure, num_bins: int, cells: Cells) -> None:
    columns = sorted({x for x, _ in cells})
    rows = sorted({y for _, y in cells})
    counts = [[cells.get((x, y)) for x in range(columns[0], columns[-1] + 1)] for y in range(rows[0], rows[-1] + 1)]
    figure.add_heatmap(
        x0=(columns[0] + 0.5) / num_bins,
        y0=(rows[0] + 0.5) / num_bins,
        dx=1 / num_bins,
        dy=1 / num_bins,
        z=counts,
        zmin=0,
        zmax=max(cells.values()),
        colorscale=_scale(max(cells.values())),
        showscale=False,
        hoverongaps=False,
        hovertemplate="mu %{x:.3f}, pi %{y:.3f}<br>%{z:,d} tokens<extra></extra>",
    )


def _scale(most: int) -> list[list[float | str]]:
    """Plotly's colour scale over counts up to `most`; each stronger colour stands for a constant factor more."""
    steps = NUM_HEAT_LEVELS - 1
    stops: list[list[float | str]] = [
        [most ** (step / steps - 1), color(f"heat-{step + 1}")] for step in range(steps + 1)
    ]
    return [[0.0, color("heat-1")], *stops]


def _points(figure: go.Figure, worst: Sequence[tuple[TokenInContext, str]]) -> None:
    tokens = [token for token, _ in worst]
    figure.add_scatter(
        x=[math.exp(token.log_mu) for token in tokens],
        y=[math.exp(token.log_pi) for token in tokens],
        mode="markers",
        marker={"symbol": "circle-open", "size": 7, "color": color("reject"), "line": {"width": 1.3}},
        hovertext=[_text(token) for token in tokens],
        hoverinfo="text",
        customdata=[anchor for _, anchor in worst],
    )


def _text(token: TokenInContext) -> str:
    before, after = token.before[-_CONTEXT:], token.after[:_CONTEXT]
    return hover(
        f"token {write_count(token.position + 1)} of {token.sequence_id[:_CONTEXT]}",
        f"{before}[{token.token[:_CONTEXT]}]{after}",
        f"d = {write_number(token.log_pi - token.log_mu)} nats; click for its row",
    )
