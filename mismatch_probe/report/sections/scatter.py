"""Token probabilities under both policies, as a map of counts: the diagonal is agreement."""

import math
from collections import defaultdict
from collections.abc import Sequence

from mismatch_probe.notation import write_count, write_estimate, write_number, write_share
from mismatch_probe.records.summary import PairSummary, Summary, TokenInContext
from mismatch_probe.report.figures.canvas import NUM_HEAT_LEVELS, SMALL, color, hover, panel, titles
from mismatch_probe.report.names import DETAILED_PAIRS, pair_key, pair_label
from mismatch_probe.report.sections.responses import most_tokens, worst_anchor
from mismatch_probe.report.view import Block, Cell, Drawing, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.stats.results import ProbabilityScatter

MOST_BINS = 64
_HEIGHT = SMALL + 60
_POINTED = 24
_CONTEXT = 40
Cells = dict[tuple[int, int], int]


def scatter(summary: Summary) -> Section:
    shown = [(pair, pair.scatter) for pair in summary.pairs if pair.scatter and pair.scatter.cells]
    blocks: list[Block] = [
        Note(f"{pair_label(pair)}: no probabilities to draw.") for pair in summary.pairs if not pair.scatter
    ]
    if shown:
        blocks.insert(0, _figure(shown, most_tokens(summary)))
    return Section(
        "scatter",
        "Token probabilities, training against inference",
        "Each sampled token has a probability under the policy that sampled it (mu) and under the policy that "
        "trains (pi). With equal arithmetic they would be equal.",
        blocks,
    )


def _figure(shown: list[tuple[PairSummary, ProbabilityScatter]], most: int) -> Figure:
    panels = [
        draw(
            Heading(
                f"scatter-{pair_key(pair)}",
                pair_label(pair),
                f"Map of token counts: {_off_diagonal(points)} of the tokens lie outside the cells that touch the "
                "diagonal.",
            ),
            points,
            MOST_BINS if len(shown) <= DETAILED_PAIRS else MOST_BINS // 2,
            [(token, worst_anchor(pair, number)) for number, token in enumerate(pair.worst_tokens[:most])],
        )
        for pair, points in shown
    ]
    rows: list[list[Cell]] = [
        [
            pair_label(pair),
            write_count(sum(count for _, _, count in points.cells)),
            _off_diagonal(points),
            write_estimate(pair.metrics.get("prob_abs_diff")),
            write_estimate(pair.metrics.get("prob_pearson")),
        ]
        for pair, points in shown
    ]
    columns = ["dtype", "tokens", "outside the diagonal's cells", "mean |pi - mu|", "correlation"]
    return Figure(
        "figure-scatter",
        "How to read it: tokens on the dashed diagonal are equally likely under both; the farther from it, the "
        "larger the mismatch. Stronger colour means more tokens, by a constant factor a step; circles are the worst "
        "tokens. A cloud on one side of the diagonal means one policy is sharper than the other.",
        panels,
        [Table("Agreement of the probabilities", columns, rows)],
        dense=True,
    )


def _off_diagonal(points: ProbabilityScatter) -> str:
    _, cells = coarser(points)
    total = sum(cells.values())
    return write_share(total - sum(count for (x, y), count in cells.items() if abs(x - y) <= 1), total)


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

    def on(figure: Drawing) -> None:
        titles(figure, "probability under mu (inference)", "probability under pi (training)")
        figure.update_axis("x", range=[0, 1], constrain="domain")
        figure.update_axis("y", range=[0, 1], scaleanchor="x", constrain="domain")
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


def _map(figure: Drawing, num_bins: int, cells: Cells) -> None:
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


def _points(figure: Drawing, worst: Sequence[tuple[TokenInContext, str]]) -> None:
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
