"""What is measured more closely on few responses: the choice of experts, and whole distributions."""

from collections.abc import Callable

from mismatch_probe.notation import write_count, write_estimate
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, pair_label
from mismatch_probe.report.pairs import chance
from mismatch_probe.report.view import Block, Cell, Column, Note, Section, Table
from mismatch_probe.stats.results import FullVocabularyCheck, LayerRouting, RoutingCheck, SampledAgainstExact

CheckedExperts = list[tuple[PairSummary, RoutingCheck]]


def experts(summary: Summary) -> list[Section]:
    """The section, or none where no pair has experts."""
    checks = [(pair, pair.routing) for pair in summary.pairs if pair.routing]
    missing = [
        f"{pair_label(pair)}: {pair.metrics_unavailable['other_experts']}"
        for pair in summary.pairs
        if not pair.routing and "other_experts" in pair.metrics_unavailable
    ]
    if not checks and not missing:
        return []
    blocks: list[Block] = [_subsample_pairs(checks)] if checks else []
    blocks += [_layers(pair, check) for pair, check in checks[:DETAILED_PAIRS]]
    if len(checks) > DETAILED_PAIRS:
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


def _subsample_pairs(checks: CheckedExperts) -> Table:
    columns: list[Column[tuple[PairSummary, RoutingCheck]]] = [
        Column("pair", lambda row: pair_label(row[0])),
        Column("tokens with other experts in some layer", lambda row: write_estimate(row[1].in_some_layer)),
        Column("tokens and layers with other experts", lambda row: write_estimate(row[1].other_experts)),
        Column("distance of weights", lambda row: write_estimate(row[1].weight_distance)),
        Column("squared d where experts moved most", lambda row: write_estimate(row[1].squares_where_moved)),
        Column("tokens", lambda row: write_count(row[1].in_some_layer.num_tokens)),
    ]
    return Table.of(
        "Experts of each pair",
        checks,
        columns,
        reading="Shares. The tenth of tokens whose experts moved most carries 0.1 of the squared d where d has nothing "
        "to do with experts.",
        is_stacked=True,
    )


def _layers(pair: PairSummary, check: RoutingCheck) -> Table:
    columns: list[Column[LayerRouting]] = [
        Column("layer", lambda layer: str(layer.layer)),
        Column("tokens with other experts", lambda layer: write_estimate(layer.other_experts)),
        Column("distance of weights", lambda layer: write_estimate(layer.weight_distance)),
    ]
    return Table.of(f"Experts by layer, {pair_label(pair)}", check.layers, columns, is_folded=True)


_ESTIMATORS = {
    "kl_k1": "KL by k1, mean of -d",
    "kl_k2": "KL by k2, half the mean of d squared",
    "kl_k3": "KL by k3, mean of e^d - d - 1",
    "tv": "total variation, half the mean of |e^d - 1|",
}

CheckedVocabulary = list[tuple[PairSummary, FullVocabularyCheck]]


def vocabulary(summary: Summary) -> Section | None:
    """None where the responses are a log's, which holds no whole distributions."""
    checks = [(pair, pair.full_vocabulary) for pair in summary.pairs if pair.full_vocabulary]
    if not checks and all(pair.is_logged for pair in summary.pairs):
        return None
    blocks: list[Block] = [_exact(checks), _from_samples(checks)] if checks else []
    disagreeing = [line for pair, check in checks for line in _disagreements(pair, check)]
    if disagreeing:
        blocks.append(
            Note(
                "Estimators whose interval of the difference does not hold 0. By chance an interval misses in "
                f"{chance(summary)} of cases; those of one pair miss together, since they are of the same tokens, and "
                "of few positions more miss, since squares of few tokens have a long tail. Misses that stay with more "
                "positions mean that the sampled tokens are not draws from mu, or that the two policies do not "
                "normalise over the same tokens:",
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


def _exact(checks: CheckedVocabulary) -> Table:
    rows: list[tuple[str, Callable[[FullVocabularyCheck], Cell]]] = [
        ("KL(mu || pi), nats", lambda check: write_estimate(check.full_kl)),
        ("total variation", lambda check: write_estimate(check.full_tv)),
        ("positions", lambda check: write_count(check.full_kl.num_tokens)),
        ("responses", lambda check: write_count(check.full_kl.num_sequences)),
    ]
    columns: list[Column[tuple[str, Callable[[FullVocabularyCheck], Cell]]]] = [
        Column("", lambda row: row[0]),
        *Column.each(checks, lambda of: pair_label(of[0]), lambda of, row: row[1](of[1])),
    ]
    return Table.of("Exact, over the whole vocabulary", rows, columns, is_stacked=True)


def _from_samples(checks: CheckedVocabulary) -> Table:
    rows = [
        (f"{pair_label(pair)}: {words}", check.estimators[name])
        for pair, check in checks
        for name, words in _ESTIMATORS.items()
    ]
    columns: list[Column[tuple[str, SampledAgainstExact]]] = [
        Column("estimator", lambda row: row[0]),
        Column("sampled", lambda row: write_estimate(row[1].sampled)),
        Column("sampled less exact", lambda row: write_estimate(row[1].difference)),
        Column("agrees", lambda row: "yes" if row[1].agrees else "no", is_text=True),
    ]
    return Table.of("From the tokens sampled at the same positions", rows, columns, is_stacked=True)


def _disagreements(pair: PairSummary, check: FullVocabularyCheck) -> list[str]:
    return [
        f"{pair_label(pair)}, {_ESTIMATORS[name]}: {write_estimate(estimator.difference)} off"
        for name, estimator in check.estimators.items()
        if not estimator.agrees
    ]
