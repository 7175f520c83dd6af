"""Both sides' choice of experts: one row a pair, and its layers on request. Nothing for a dense checkpoint."""

from mismatch_probe.notation import ABSENT, write_count, write_estimate
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, pair_label
from mismatch_probe.report.view import Block, Cell, Note, Section, Table
from mismatch_probe.stats.results import RoutingCheck

Checked = list[tuple[PairSummary, RoutingCheck]]


def experts(summary: Summary) -> list[Section]:
    """The section, or none where no pair has experts."""
    checked = [(pair, pair.routing) for pair in summary.pairs if pair.routing]
    missing = [
        f"{pair_label(pair)}: {pair.metrics_unavailable['other_experts']}"
        for pair in summary.pairs
        if not pair.routing and "other_experts" in pair.metrics_unavailable
    ]
    if not checked and not missing:
        return []
    blocks: list[Block] = [_pairs(checked)] if checked else []
    blocks += [_layers(pair, check) for pair, check in checked[:DETAILED_PAIRS]]
    if len(checked) > DETAILED_PAIRS:
        blocks.append(Note(MORE_PAIRS_NOTE))
    if missing:
        blocks.append(Note("Pairs whose choice of experts was not compared:", missing))
    return [
        Section(
            "experts",
            "Do both sides choose the same experts?",
            "Which experts each side takes for the tokens of a few responses, and how it weighs them, in one forward "
            "pass over the same tokens. The distance of weights is half the sum of their differences over experts.",
            blocks,
        )
    ]


def _pairs(checked: Checked) -> Table:
    rows: list[list[Cell]] = [
        [
            pair_label(pair),
            write_estimate(check.in_some_layer),
            write_estimate(check.other_experts),
            write_estimate(check.weight_distance),
            ABSENT if check.squares_where_moved is None else write_estimate(check.squares_where_moved),
            write_count(check.in_some_layer.num_tokens),
        ]
        for pair, check in checked
    ]
    columns = [
        "pair",
        "tokens with other experts in some layer",
        "tokens and layers with other experts",
        "distance of weights",
        "squared d where experts moved most",
        "tokens",
    ]
    return Table(
        "Experts of each pair",
        columns,
        rows,
        reading="Shares. The tenth of tokens whose experts moved most carries 0.1 of the squared d where d has nothing "
        "to do with experts.",
        stacked=True,
    )


def _layers(pair: PairSummary, check: RoutingCheck) -> Table:
    rows: list[list[Cell]] = [
        [str(layer.layer), write_estimate(layer.other_experts), write_estimate(layer.weight_distance)]
        for layer in check.layers
    ]
    columns = ["layer", "tokens with other experts", "distance of weights"]
    return Table(f"Experts by layer, {pair_label(pair)}", columns, rows, folded=True)
