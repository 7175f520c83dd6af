"""Token probabilities under both policies."""

from mismatch_probe.notation import write_count, write_estimate, write_share
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures import scatter as drawing
from mismatch_probe.report.names import DETAILED_PAIRS, pair_key, pair_label
from mismatch_probe.report.sections.worst import most_tokens, worst_anchor
from mismatch_probe.report.view import Block, Cell, Figure, Heading, Note, Section, Table
from mismatch_probe.stats.results import ProbabilityScatter


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
        drawing.draw(
            Heading(
                f"scatter-{pair_key(pair)}",
                pair_label(pair),
                f"Map of token counts: {_off_diagonal(points)} of the tokens lie outside the cells that touch the "
                "diagonal.",
            ),
            points,
            drawing.MOST_BINS if len(shown) <= DETAILED_PAIRS else drawing.MOST_BINS // 2,
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
    _, cells = drawing.coarser(points)
    total = sum(cells.values())
    return write_share(total - sum(count for (x, y), count in cells.items() if abs(x - y) <= 1), total)
