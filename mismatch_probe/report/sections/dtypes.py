"""Every metric of every pair, with its interval and its N."""

from collections.abc import Collection
from typing import Final

from markupsafe import Markup

from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import ABSENT, write_count, write_estimate
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import DETAILED_PAIRS, HEADLINE_METRICS, metric_aggregate, metric_meaning, pair_label
from mismatch_probe.report.pairs import level, size_sentence
from mismatch_probe.report.view import Block, Cell, Note, Section, Table

_BY_ROUNDING: Final = {True: "explained by {}", False: "more than {} makes", None: ABSENT}
"""Whether rounding, by a format or by the order of sums, makes what settings change."""


def dtypes(summary: Summary) -> Section:
    blocks: list[Block] = [_side_by_side(summary)]
    if any(pair.settings_told_apart for pair in summary.pairs):
        blocks.append(_settings(summary))
    explained = set(HEADLINE_METRICS)
    for pair in summary.pairs[:DETAILED_PAIRS]:
        blocks.append(_every_metric(pair, explained))
        explained |= set(pair.metrics)
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


def _side_by_side(summary: Summary) -> Table:
    names = [name for name in HEADLINE_METRICS if any(name in pair.metrics for pair in summary.pairs)]
    rows: list[list[Cell]] = [
        [metric_name(name), *(write_estimate(pair.metrics.get(name)) for pair in summary.pairs)] for name in names
    ]
    rows.append([Markup("measured on"), *(size_sentence(pair) for pair in summary.pairs)])
    return Table("The main metrics of each pair", ["metric", *map(pair_label, summary.pairs)], rows, stacked=True)


def _settings(summary: Summary) -> Table:
    """What each side's own settings change."""
    told = [(pair, pair.settings_told_apart) for pair in summary.pairs]
    names = list(dict.fromkeys(name for _, contrast in told if contrast is not None for name in contrast.ratios))
    rows: list[list[Cell]] = [
        [
            pair_label(pair),
            sides_label(*contrast.beside),
            {"pi": "training path", "mu": "inference engine"}[contrast.side],
            visible(", ".join(contrast.settings)),
            *(write_estimate(contrast.ratios.get(name)) for name in names),
            _BY_ROUNDING[contrast.is_rounding].format(contrast.format or "the order of sums"),
        ]
        for pair, contrast in told
        if contrast is not None
    ]
    columns = ["pair", "beside", "side", "what is set otherwise", *(f"{name}, times" for name in names), "rounding"]
    return Table(
        "What each side's own settings change",
        columns,
        rows,
        text_columns=frozenset({1, 2, 3, 4 + len(names)}),
        stacked=True,
    )


def _every_metric(pair: PairSummary, explained: Collection[str]) -> Table:
    """With the meaning of those that nothing above has `explained`."""
    rows: list[list[Cell]] = []
    for name, estimate in pair.metrics.items():
        written = write_estimate(estimate)
        prompts = ABSENT if estimate.num_prompts is None else write_count(estimate.num_prompts)
        sizes = [prompts, write_count(estimate.num_sequences), write_count(estimate.num_tokens)]
        shown = Markup("<code>{}</code>").format(name) if name in explained else metric_name(name)
        rows.append([shown, written.value, written.interval or ABSENT, *sizes, f"{estimate.by}s"])
    return Table(
        f"Every metric of {pair_label(pair)}",
        ["metric", "value", "interval", "prompts", "responses", "tokens", "averages over"],
        rows,
        text_columns=frozenset({6}),
        folded=True,
    )


def metric_name(name: str) -> Markup:
    """The name people and pipelines type, with its meaning under it."""
    meaning = metric_meaning(name)
    aggregate = metric_aggregate(name)
    words = f"{aggregate}; {meaning}" if aggregate != "mean" and meaning else meaning
    return Markup('<code>{}</code><span class="meaning">{}</span>').format(name, words)
