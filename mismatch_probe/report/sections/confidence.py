"""Deviation against how sure the model is, and both policies' token probabilities as a map of counts."""

import math
from collections import defaultdict
from collections.abc import Sequence

from mismatch_probe.notation import write_count, write_estimate, write_number, write_range, write_share
from mismatch_probe.records.summary import PairSummary, Summary, TokenInContext
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    NUM_HEAT_LEVELS,
    SMALL,
    band,
    color,
    hover,
    hover_estimate,
    line,
    logarithmic,
    panel,
    titles,
)
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, StyleOf, pair_key, pair_label, pair_styles
from mismatch_probe.report.sections.length import FEWEST_RESPONSES, confidence_style, draw_by_confidence
from mismatch_probe.report.sections.responses import most_tokens, worst_anchor
from mismatch_probe.report.view import Block, Column, Drawing, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.stats.results import ConfidenceBin, ConfidenceCurve, ProbabilityScatter

_MEASURES = {
    "reference_probability": "reference probability",
    "inference_probability": "inference probability",
    "entropy_nats": "entropy",
}

Separated = list[tuple[PairSummary, list[ConfidenceCurve]]]
_BAND_ALPHA = 0.22


def confidence(summary: Summary) -> Section | None:
    """None where the responses are a log's, and there is nothing to sort their tokens by."""
    pairs = [pair for pair in summary.pairs if pair.confidence]
    blocks: list[Block] = []
    if pairs:
        blocks = [_confidence_figure(pairs, pair_styles(summary.pairs))]
    for by in _MEASURES:
        curves = [
            (pair, [curve for curve in pair.length.by_confidence if curve.by == by])
            for pair in summary.pairs[:DETAILED_PAIRS]
            if pair.length
        ]
        pairs_with_curve = [(pair, curve) for pair, curve in curves if curve]
        if pairs_with_curve:
            blocks.append(_by_position(by, pairs_with_curve))
    if not blocks and all(pair.is_logged for pair in summary.pairs):
        return None
    if not blocks:
        blocks.append(Note("No token was measured, so there are no bins."))
    if len(summary.pairs) > DETAILED_PAIRS:
        blocks.append(Note(MORE_PAIRS_NOTE))
    return Section(
        "confidence",
        "Deviation against confidence",
        "Unlikely tokens deviate most. A curve against length can bend only because longer responses hold other "
        "tokens; inside a bin of confidence that explanation is gone.",
        blocks,
    )


def _confidence_figure(pairs: list[PairSummary], style_of: StyleOf) -> Figure:
    heading = Heading(
        "confidence-mean",
        f"Mean |d| by {_probability(pairs)}",
        "; ".join(
            f"{pair_label(pair)} goes from {write_estimate(pair.confidence[0].mean_abs_diff)} in the lowest bin to "
            f"{write_estimate(pair.confidence[-1].mean_abs_diff)} in the highest"
            for pair in pairs
        ),
    )
    return Figure(
        "figure-confidence",
        "How to read it: lines are means with their interval. A fall to the right is what rounding of logits does; "
        "a level that does not fall at sure tokens is worth a look. Bins that tokens of fewer than "
        f"{FEWEST_RESPONSES} responses fall into are left to the table.",
        [_confidence_panel(heading, pairs, style_of)],
        [_confidence_table(pair) for pair in pairs[:DETAILED_PAIRS]],
        key=[(pair_label(pair), style_of(pair)) for pair in pairs],
    )


def _probability(pairs: Sequence[PairSummary]) -> str:
    """Whose probability the bins are of: mu's where no pair has a reference."""
    has_reference = any(bin_.rms_error_pi is not None for pair in pairs for bin_ in pair.confidence)
    return "reference probability" if has_reference else _MEASURES["inference_probability"]


def _by_position(by: str, pairs_with_curve: Separated) -> Figure:
    words = _MEASURES[by]
    panels, tables = [], []
    for pair, curves in pairs_with_curve:
        title = f"{pair_label(pair)}, by {words}"
        heading = Heading(
            f"confidence-{by}-{pair_key(pair)}", title, f"One line for each of {len(curves)} bins of {words}."
        )
        panels.append(draw_by_confidence(heading, curves))
        tables.append(_positions(title, curves))
    widest = max((curves for _, curves in pairs_with_curve), key=len)
    key = [(_range(curve), confidence_style(curve, widest)) for curve in widest]
    return Figure(
        f"figure-length-by-{by.replace('_', '-')}",
        "How to read it: mean |d| by position, one line for each bin of confidence. Where the lines are flat, "
        "length by itself does nothing; a line that rises means that position matters among equally hard tokens.",
        panels,
        tables,
        key=key,
        dense=True,
    )


def _positions(title: str, curves: Sequence[ConfidenceCurve]) -> Table:
    """Mean |d| of each stretch of positions, a column for each bin of confidence."""
    means = [{(bin_.low, write_range(bin_)): bin_.mean for bin_ in curve.abs_diff_by_position} for curve in curves]
    stretches = sorted({stretch for of_curve in means for stretch in of_curve})
    columns: list[Column[tuple[float, str]]] = [
        Column("tokens", lambda stretch: stretch[1]),
        *Column.each(
            zip(curves, means, strict=True),
            lambda item: _range(item[0]),
            lambda item, stretch: write_estimate(item[1].get(stretch)),
        ),
    ]
    return Table.of(f"{title}: mean |d| by position", stretches, columns)


def _range(curve: ConfidenceCurve) -> str:
    return f"{_MEASURES[curve.by]} {curve.low:g} to {curve.high:g}"


def _confidence_table(pair: PairSummary) -> Table:
    probability = _probability([pair])
    columns: list[Column[ConfidenceBin]] = [
        Column(probability, bin_label),
        Column("tokens", lambda bin_: write_count(bin_.num_tokens)),
        Column("mean |d|", lambda bin_: write_estimate(bin_.mean_abs_diff)),
    ]
    if any(bin_.rms_error_pi is not None for bin_ in pair.confidence):
        columns += [
            Column("rms of e_pi", lambda bin_: write_number(bin_.rms_error_pi)),
            Column("rms of e_mu", lambda bin_: write_number(bin_.rms_error_mu)),
        ]
    return Table.of(f"{pair_label(pair)} by {probability}", pair.confidence, columns)


def _confidence_panel(heading: Heading, pairs: Sequence[PairSummary], style_of: StyleOf) -> Panel:
    """Mean abs(d) with its interval in bins of the reference probability, drawn equally wide."""
    edges = sorted({edge for pair in pairs for bin_ in pair.confidence for edge in (bin_.low, bin_.high)})

    def on(figure: Drawing) -> None:
        titles(figure, f"{_probability(pairs)} of the sampled token", "mean |d|, nats")
        for pair in pairs:
            bins = [bin_ for bin_ in _bins_of_enough_responses(pair) if bin_.mean_abs_diff.value > 0]
            x = [float(edges.index(bin_.low)) for bin_ in bins]
            low, high = ([getattr(bin_.mean_abs_diff, end) for bin_ in bins] for end in ("low", "high"))
            style, name = style_of(pair), pair_label(pair)
            band(figure, x, low, high, style, _BAND_ALPHA)
            texts = [hover_estimate(name, bin_label(bin_), bin_.mean_abs_diff, "nats") for bin_ in bins]
            line(figure, x, [bin_.mean_abs_diff.value for bin_ in bins], style, texts)
        if not figure.traces:
            return
        figure.update_axis(
            "x",
            tickvals=[number - 0.5 for number in range(len(edges))],
            ticktext=[f"{edge:g}" for edge in edges],
            tickangle=-40,
        )
        logarithmic(
            figure,
            "y",
            [bin_.mean_abs_diff.value for pair in pairs for bin_ in _bins_of_enough_responses(pair)],
            LEAST_SPAN,
        )

    return panel(heading, on)


def _bins_of_enough_responses(pair: PairSummary) -> list[ConfidenceBin]:
    """The bins that tokens of enough responses fall into for a point to mean something."""
    return [bin_ for bin_ in pair.confidence if bin_.mean_abs_diff.num_sequences >= FEWEST_RESPONSES]


def bin_label(bin_: ConfidenceBin) -> str:
    return f"{bin_.low:g} to {bin_.high:g}"


MOST_BINS = 64
_HEIGHT = SMALL + 60
_POINTED = 24
_CONTEXT = 40
Cells = dict[tuple[int, int], int]


def scatter(summary: Summary) -> Section:
    pairs = [(pair, pair.scatter) for pair in summary.pairs if pair.scatter and pair.scatter.cells]
    blocks: list[Block] = [
        Note(f"{pair_label(pair)}: no probabilities to draw.") for pair in summary.pairs if not pair.scatter
    ]
    if pairs:
        blocks.insert(0, _scatter_figure(pairs, most_tokens(summary)))
    return Section(
        "scatter",
        "Token probabilities, training against inference",
        "Each sampled token has a probability under the policy that sampled it (mu) and under the policy that "
        "trains (pi). With equal arithmetic they would be equal.",
        blocks,
    )


def _scatter_figure(pairs: list[tuple[PairSummary, ProbabilityScatter]], most: int) -> Figure:
    panels = [
        draw(
            Heading(
                f"scatter-{pair_key(pair)}",
                pair_label(pair),
                f"Map of token counts: {_off_diagonal(points)} of the tokens lie outside the cells that touch the "
                "diagonal.",
            ),
            points,
            MOST_BINS if len(pairs) <= DETAILED_PAIRS else MOST_BINS // 2,
            [(token, worst_anchor(pair, number)) for number, token in enumerate(pair.worst_tokens[:most])],
        )
        for pair, points in pairs
    ]
    columns: list[Column[tuple[PairSummary, ProbabilityScatter]]] = [
        Column("dtype", lambda row: pair_label(row[0])),
        Column("tokens", lambda row: write_count(sum(count for _, _, count in row[1].cells))),
        Column("outside the diagonal's cells", lambda row: _off_diagonal(row[1])),
        Column("mean |pi - mu|", lambda row: write_estimate(row[0].metrics.get("prob_abs_diff"))),
        Column("correlation", lambda row: write_estimate(row[0].metrics.get("prob_pearson"))),
    ]
    return Figure(
        "figure-scatter",
        "How to read it: tokens on the dashed diagonal are equally likely under both; the farther from it, the "
        "larger the mismatch. Stronger colour means more tokens, by a constant factor a step; circles are the worst "
        "tokens. A cloud on one side of the diagonal means one policy is sharper than the other.",
        panels,
        [Table.of("Agreement of the probabilities", pairs, columns)],
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
        colorscale=_heat_scale(max(cells.values())),
        showscale=False,
        hoverongaps=False,
        hovertemplate="mu %{x:.3f}, pi %{y:.3f}<br>%{z:,d} tokens<extra></extra>",
    )


def _heat_scale(most: int) -> list[list[float | str]]:
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
        hovertext=[_hover_of_token(token) for token in tokens],
        hoverinfo="text",
        customdata=[anchor for _, anchor in worst],
    )


def _hover_of_token(token: TokenInContext) -> str:
    tokens_before, tokens_after = token.before[-_CONTEXT:], token.after[:_CONTEXT]
    return hover(
        f"token {write_count(token.position + 1)} of {token.sequence_id[:_CONTEXT]}",
        f"{tokens_before}[{token.token[:_CONTEXT]}]{tokens_after}",
        f"d = {write_number(token.log_pi - token.log_mu)} nats; click for its row",
    )
