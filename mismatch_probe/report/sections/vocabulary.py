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
    disagreeing = [line for pair, check in checked for line in _disagreements(pair, check)]
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
        ["KL(mu || pi), nats", *(write_estimate(check.full_kl) for _, check in checked)],
        ["total variation", *(write_estimate(check.full_tv) for _, check in checked)],
        ["positions", *(write_count(check.full_kl.num_tokens) for _, check in checked)],
        ["responses", *(write_count(check.full_kl.num_sequences) for _, check in checked)],
    ]
    columns = ["", *(pair_label(pair) for pair, _ in checked)]
    return Table("Exact, over the whole vocabulary", columns, rows, stacked=True)


def _sampled(checked: Checked) -> Table:
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
