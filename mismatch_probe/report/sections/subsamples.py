"""What is measured more closely on few responses: the choice of experts, and whole distributions."""

from mismatch_probe.notation import ABSENT, write_count, write_estimate
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, pair_label
from mismatch_probe.report.pairs import chance
from mismatch_probe.report.view import Block, Cell, Note, Section, Table
from mismatch_probe.stats.results import FullVocabularyCheck, RoutingCheck

CheckedExperts = list[tuple[PairSummary, RoutingCheck]]


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


def _pairs(checked: CheckedExperts) -> Table:
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


_ESTIMATORS = {
    "kl_k1": "KL by k1, mean of -d",
    "kl_k2": "KL by k2, half the mean of d squared",
    "kl_k3": "KL by k3, mean of e^d - d - 1",
    "tv": "total variation, half the mean of |e^d - 1|",
}

CheckedVocabulary = list[tuple[PairSummary, FullVocabularyCheck]]


def vocabulary(summary: Summary) -> Section:
    checked = [(pair, pair.full_vocabulary) for pair in summary.pairs if pair.full_vocabulary]
    blocks: list[Block] = [_exact(checked), _sampled(checked)] if checked else []
    disagreeing = [line for pair, check in checked for line in _disagreements(pair, check)]
    if disagreeing:
        blocks.append(
            Note(
                "Estimators whose interval of the difference does not hold 0. By chance an interval misses in "
                f"{chance(summary)} of cases; more than that means that the sampled tokens are not draws from mu, or "
                "that the two policies do not normalise over the same tokens:",
                disagreeing,
            )
        )
    missing = [
        f"{pair_label(pair)}: {pair.metrics_unavailable.get('full_kl', 'not recorded')}"
        for pair in summary.pairs
        if not pair.full_vocabulary
    ]
    if missing:
        blocks.append(Note("Pairs whose whole distributions were not compared:", missing))
    return Section(
        "vocabulary",
        "Sampled estimators against the whole vocabulary",
        "At some positions every token's probability was computed on both sides, so that KL and total variation are "
        "exact there and the estimates from sampled tokens can be checked. Both sides are one forward pass over the "
        "same context.",
        blocks,
    )


def _exact(checked: CheckedVocabulary) -> Table:
    rows: list[list[Cell]] = [
        ["KL(mu || pi), nats", *(write_estimate(check.full_kl) for _, check in checked)],
        ["total variation", *(write_estimate(check.full_tv) for _, check in checked)],
        ["positions", *(write_count(check.full_kl.num_tokens) for _, check in checked)],
        ["responses", *(write_count(check.full_kl.num_sequences) for _, check in checked)],
    ]
    columns = ["", *(pair_label(pair) for pair, _ in checked)]
    return Table("Exact, over the whole vocabulary", columns, rows, stacked=True)


def _sampled(checked: CheckedVocabulary) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{pair_label(pair)}: {words}",
            write_estimate(check.estimators[name].sampled),
            write_estimate(check.estimators[name].difference),
            "yes" if check.estimators[name].agrees else "no",
        ]
        for pair, check in checked
        for name, words in _ESTIMATORS.items()
    ]
    return Table(
        "From the tokens sampled at the same positions",
        ["estimator", "sampled", "sampled less exact", "agrees"],
        rows,
        text_columns=frozenset({3}),
        stacked=True,
    )


def _disagreements(pair: PairSummary, check: FullVocabularyCheck) -> list[str]:
    return [
        f"{pair_label(pair)}, {_ESTIMATORS[name]}: {write_estimate(estimator.difference)} off"
        for name, estimator in check.estimators.items()
        if not estimator.agrees
    ]
