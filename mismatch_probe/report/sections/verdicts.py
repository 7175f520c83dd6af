"""The verdict on each pair with its evidence, and where to look when there is a bug or doubt; equal ones are merged.

Every metric of every pair, with its interval and its N.
"""

from collections.abc import Collection, Sequence
from typing import Final

from markupsafe import Markup

from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import ABSENT, capital, join_names, write_count, write_estimate
from mismatch_probe.records.summary import Cause, PairSummary, SettingsContrast, Summary
from mismatch_probe.report.names import (
    DETAILED_PAIRS,
    HEADLINE_METRICS,
    advice_parts,
    metric_aggregate,
    pair_key,
    pair_label,
    visible_sentence,
    where_to_look,
)
from mismatch_probe.report.pairs import level, size_sentence
from mismatch_probe.report.view import Badge, Block, Cell, Column, Finding, Note, Section, Table
from mismatch_probe.stats.catalogue import metric_meaning
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.findings import BY_EXPLAIN
from mismatch_probe.verdict.headline import grows

_FINE = ("clean", "precision")
_WHAT_DECIDES = "FP32 against FP32 decides: a gap that stays there is a bug; a gap that closes there is precision."
_OF_A_LOG = "A log alone does not always tell rounding from a bug; with its checkpoint each cause can be computed."
_OF_ITS_CHECKPOINT = "What the log's checkpoint showed stands first; what the log shows by itself follows."
_MOST_NAMED = 4
_OF_FINE = {
    "clean": "the two sides agree in {}",
    "precision": "rounding is all that is left in {}",
    "routing": "experts are chosen otherwise by rounding in {}",
    "settings": "settings are all that differs in {}",
}
"""What a fine verdict comes to for the pairs of its code."""

Lists = list[tuple[str, Sequence[str] | Sequence[Markup]]]


def verdicts(summary: Summary) -> Section:
    advice_above, findings = list(summary.verdict.advice), []
    for pairs in _pairs_by_verdict(summary.pairs):
        findings.append(_pairs_finding(pairs, advice_above))
        advice_above += [advice for pair in pairs for advice in pair.verdict.advice]
    return Section(
        "verdicts",
        "Verdict on each pair",
        _what_decides(summary.pairs),
        findings,
    )


def _what_decides(pairs: Sequence[PairSummary]) -> str:
    evidence_of_logs = [line for pair in pairs if pair.is_logged for line in pair.verdict.evidence]
    if any(line.startswith(BY_EXPLAIN) for line in evidence_of_logs):
        return _OF_ITS_CHECKPOINT
    return _OF_A_LOG if any(pair.is_logged for pair in pairs) else _WHAT_DECIDES


def _pairs_by_verdict(pairs: Sequence[PairSummary]) -> list[list[PairSummary]]:
    """Pairs of the same verdict: those that are fine by their code, and bugs with the same words."""
    groups: dict[tuple[str, ...], list[PairSummary]] = {}
    for pair in pairs:
        verdict = pair.verdict
        key = (verdict.kind, verdict.code, *([] if _is_fine(pair) else [verdict.sentence]))
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def _is_fine(pair: PairSummary) -> bool:
    return pair.verdict.kind in _FINE and not grows(pair)


def _pairs_finding(pairs: Sequence[PairSummary], advice_above: Sequence[str]) -> Finding:
    first, is_fine = pairs[0], _is_fine(pairs[0])
    lists = _lists(first, advice_above) if len(pairs) == 1 else _of_all(pairs, advice_above, with_sentences=is_fine)
    is_merged = is_fine and len(pairs) > 1
    return Finding(
        f"verdict-{pair_key(first)}",
        _label_of_pairs(pairs),
        Badge.of_pair(first),
        _sentence_of_all(pairs) if is_merged else first.verdict.sentence,
        [(heading, items) for heading, items in lists if items],
        is_folded=is_fine,
    )


def _label_of_pairs(pairs: Sequence[PairSummary]) -> str:
    """`BF16, FP16 and FP32`, or `BF16, FP16, FP32 and 6 more`."""
    labels = [pair_label(pair) for pair in pairs]
    if len(labels) > _MOST_NAMED:
        labels = [*labels[: _MOST_NAMED - 1], f"{len(labels) - _MOST_NAMED + 1} more"]
    return join_names(labels)


def _sentence_of_all(pairs: Sequence[PairSummary]) -> str:
    """`Rounding is all that is left in BF16 and FP16.`, of pairs of one code that are fine."""
    sentence = _OF_FINE.get(pairs[0].verdict.code, "no bug in {}").format(
        join_names([pair_label(pair) for pair in pairs])
    )
    return f"{capital(sentence)}."


def _of_all(pairs: Sequence[PairSummary], advice_above: Sequence[str], *, with_sentences: bool) -> Lists:
    """What holds for all once, what differs under each pair's name."""
    of_each = [_lists(pair, advice_above) for pair in pairs]
    common_entries = [entry for entry in of_each[0] if all(entry in lists for lists in of_each)]
    common_lists: Lists = list(common_entries)
    for pair, lists in zip(pairs, of_each, strict=True):
        own = [item for entry in lists if entry not in common_entries for item in entry[1]]
        sentence = [pair.verdict.sentence] if with_sentences else []
        common_lists.append((pair_label(pair), [*sentence, *own]))
    return common_lists


def _lists(pair: PairSummary, advice_above: Sequence[str]) -> Lists:
    verdict = pair.verdict
    lists: Lists = [("Evidence", verdict.evidence)]
    if verdict.kind not in _FINE:
        lists.append(("Where to look", where_to_look(pair)))
    lists.append(("Advice", _advice_left(verdict.advice, advice_above)))
    lists.append(("Also seen", [_other(cause) for cause in verdict.also]))
    return lists


def _advice_left(advice: Sequence[str], advice_above: Sequence[str]) -> list[str]:
    """Of a sentence that stands above its command alone."""
    sentences = {advice_parts(each)[0] for each in advice_above}
    remaining = [advice_parts(each) for each in advice if each not in advice_above]
    return [
        f"For this pair: `{command}`" if what in sentences else f"{what}: `{command}`" if command else what
        for what, command in remaining
    ]


def _other(cause: Cause) -> Markup:
    evidence = [f"Evidence: {'; '.join(cause.evidence)}."] if cause.evidence else []
    return Markup("<code>{}</code>: {}").format(
        cause.code, visible_sentence(" ".join([cause.sentence, *evidence, *cause.advice]))
    )


_BY_ROUNDING: Final = {True: "explained by {}", False: "more than {} makes", None: ABSENT}
"""Whether rounding, by a format or by the order of sums, makes what settings change."""


def dtypes(summary: Summary) -> Section:
    blocks: list[Block] = [_metrics_side_by_side(summary)]
    if any(pair.settings_contrast for pair in summary.pairs):
        blocks.append(_own_settings_table(summary))
    known_metrics = set(HEADLINE_METRICS)
    for pair in summary.pairs[:DETAILED_PAIRS]:
        blocks.append(_metrics_of_pair(pair, known_metrics))
        known_metrics |= set(pair.metrics)
    if len(summary.pairs) > DETAILED_PAIRS:
        blocks.append(Note(f"Every metric stands here for the first {DETAILED_PAIRS} pairs; summary.json holds all."))
    missing = {f"{name}: {why}" for pair in summary.pairs for name, why in pair.metrics_unavailable.items()}
    if missing:
        blocks.append(Note("Metrics that could not be had:", sorted(missing)))
    return Section(
        "dtypes",
        "Dtypes side by side",
        f"d = log pi - log mu, in nats, on response tokens only. Brackets hold {level(summary)} intervals, "
        "clustered by prompt, since the tokens of one response, and the responses to one prompt, are not independent.",
        blocks,
    )


def _metrics_side_by_side(summary: Summary) -> Table:
    names = [name for name in HEADLINE_METRICS if any(name in pair.metrics for pair in summary.pairs)]

    def cell(pair: PairSummary, name: str | None) -> Cell:
        return size_sentence(pair) if name is None else write_estimate(pair.metrics.get(name))

    columns: list[Column[str | None]] = [
        Column("metric", lambda name: Markup("measured on") if name is None else metric_name(name)),
        *Column.each(summary.pairs, pair_label, cell),
    ]
    return Table.of("The main metrics of each pair", [*names, None], columns, is_stacked=True)


def _own_settings_table(summary: Summary) -> Table:
    """What each side's own settings change."""
    contrasts = [(pair, pair.settings_contrast) for pair in summary.pairs if pair.settings_contrast is not None]
    names = list(dict.fromkeys(name for _, contrast in contrasts for name in contrast.ratios))
    sides = {"pi": "training path", "mu": "inference engine"}
    columns: list[Column[tuple[PairSummary, SettingsContrast]]] = [
        Column("pair", lambda row: pair_label(row[0])),
        Column("counterpart", lambda row: sides_label(*row[1].counterpart), is_text=True),
        Column("side", lambda row: sides[row[1].side], is_text=True),
        Column("what is set otherwise", lambda row: ", ".join(row[1].settings), is_text=True),
        *Column.each(names, lambda name: f"{name}, times", lambda name, row: write_estimate(row[1].ratios.get(name))),
        Column("rounding", lambda row: _rounding(row[1]), is_text=True),
    ]
    return Table.of("What each side's own settings change", contrasts, columns, is_stacked=True)


def _rounding(contrast: SettingsContrast) -> str:
    return _BY_ROUNDING[contrast.is_rounding].format(contrast.format or "the order of sums")


def _metrics_of_pair(pair: PairSummary, known_metrics: Collection[str]) -> Table:
    """With the meaning of the metrics that are not among `known_metrics`, which the page explains above."""

    def name_of(name: str) -> Markup:
        return Markup("<code>{}</code>").format(name) if name in known_metrics else metric_name(name)

    columns: list[Column[tuple[str, Estimate]]] = [
        Column("metric", lambda row: name_of(row[0])),
        Column("value", lambda row: write_estimate(row[1]).value),
        Column("interval", lambda row: write_estimate(row[1]).interval or ABSENT),
        Column("prompts", lambda row: ABSENT if row[1].num_prompts is None else write_count(row[1].num_prompts)),
        Column("responses", lambda row: write_count(row[1].num_sequences)),
        Column("tokens", lambda row: write_count(row[1].num_tokens)),
        Column("averages over", lambda row: f"{row[1].by}s", is_text=True),
    ]
    return Table.of(f"Every metric of {pair_label(pair)}", pair.metrics.items(), columns, is_folded=True)


def metric_name(name: str) -> Markup:
    """The name people and pipelines type, with its meaning under it."""
    meaning = metric_meaning(name)
    aggregate = metric_aggregate(name)
    words = f"{meaning} ({aggregate})" if aggregate != "mean" and meaning else meaning
    return Markup('<code>{}</code><span class="meaning">{}</span>').format(name, words)
