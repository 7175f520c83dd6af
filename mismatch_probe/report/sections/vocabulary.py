"""Exact divergences over the whole vocabulary on a subsample, and whether the sampled estimators agree with them."""

from mismatch_probe.notation import write_count, write_estimate
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.view import Block, Cell, Note, Section, Table
from mismatch_probe.stats.results import FullVocabularyCheck

_ESTIMATORS = {
    "kl_k1": "KL by k1, mean of -d",
    "kl_k2": "KL by k2, half the mean of d squared",
    "kl_k3": "KL by k3, mean of e^d - d - 1",
    "tv": "total variation, half the mean of |e^d - 1|",
}

Checked = list[tuple[PairSummary, FullVocabularyCheck]]


def vocabulary(summary: Summary) -> Section:
    checked = [(pair, pair.full_vocabulary) for pair in summary.pairs if pair.full_vocabulary]
    blocks: list[Block] = [_exact(checked), _sampled(checked)] if checked else []
    disagreeing = [line for pair, found in checked for line in _disagreements(pair, found)]
    if disagreeing:
        blocks.append(
            Note(
                "Estimators whose interval of the difference does not hold 0. By chance a 95 % interval misses once in "
                "20; more than that means that the sampled tokens are not draws from mu, or that the two policies do "
                "not normalise over the same tokens:",
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


def _exact(checked: Checked) -> Table:
    rows: list[list[Cell]] = [
        ["KL(mu || pi), nats", *(write_estimate(found.full_kl) for _, found in checked)],
        ["total variation", *(write_estimate(found.full_tv) for _, found in checked)],
        ["positions", *(write_count(found.full_kl.num_tokens) for _, found in checked)],
        ["responses", *(write_count(found.full_kl.num_sequences) for _, found in checked)],
    ]
    columns = ["", *(pair_label(pair) for pair, _ in checked)]
    return Table("Exact, over the whole vocabulary", columns, rows, stacked=True)


def _sampled(checked: Checked) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{pair_label(pair)}: {words}",
            write_estimate(found.estimators[name].sampled),
            write_estimate(found.estimators[name].difference),
            "yes" if found.estimators[name].agrees else "no",
        ]
        for pair, found in checked
        for name, words in _ESTIMATORS.items()
    ]
    return Table(
        "From the tokens sampled at the same positions",
        ["estimator", "sampled", "sampled less exact", "agrees"],
        rows,
        text_columns=frozenset({3}),
        stacked=True,
    )


def _disagreements(pair: PairSummary, found: FullVocabularyCheck) -> list[str]:
    return [
        f"{pair_label(pair)}, {_ESTIMATORS[name]}: {write_estimate(one.difference)} off"
        for name, one in found.estimators.items()
        if not one.agrees
    ]
