"""`diff`: what another setting did, what changed between the two runs, and both in every figure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Final

from markupsafe import Markup

from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import ABSENT, capital, write_count, write_estimate, write_many
from mismatch_probe.records.answers import (
    APPLIED,
    Change,
    Difference,
    DifferenceSide,
    MetricDifference,
    PairDifference,
)
from mismatch_probe.records.files import write_text
from mismatch_probe.records.summary import Counts
from mismatch_probe.report.figures.difference import FIRST, SECOND, draw_bins, draw_ratios
from mismatch_probe.report.names import visible
from mismatch_probe.report.rendering import PlotlyJs, render_page
from mismatch_probe.report.view import (
    Answer,
    Badge,
    Block,
    Cell,
    Column,
    Figure,
    Finding,
    Heading,
    Lines,
    Note,
    Panel,
    Section,
    Table,
    Tile,
)

SHOWN_METRICS = (
    "abs_logprob_diff",
    "abs_logprob_diff_p99",
    "abs_logprob_diff_max",
    "logprob_diff_rms",
    "kl_k1",
    "kl_k3",
    "prob_abs_diff",
    "prob_pearson",
    "ess_seq",
    "top1_flip",
)
_KINDS_FIRST: Final = ("settings", APPLIED, "model", "versions", "hardware", "git")
_AT_THE_TOP: Final = 8
_OTHER_LENGTH: Final = 1.25
"""Mean lengths of responses whose ratio is at least this get a sentence."""

ChangeInStages = tuple[Change, list[str]]
NamedMetric = tuple[str, MetricDifference]


def write_difference(difference: Difference, path: Path, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> None:
    """
    Raises:
        StorageError: the disk refused the write.
    """
    write_text(path, render_difference(difference, plotly_js))


def render_difference(difference: Difference, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """The page as HTML; the same difference gives the same bytes."""
    return render_page(
        difference_answer(difference),
        plotly_js,
        tool_version=difference.tool_version,
        sources=["the two run directories"],
        document=difference.model_dump(mode="json"),
    )


def difference_answer(difference: Difference) -> Answer:
    names = _run_names(difference)
    changes = sorted(_without_repeats(difference.changes), key=lambda change: _rank(change[0]))
    worst = min(difference.pairs, key=lambda pair: _badge(pair).rank)
    return Answer(
        subject="difference of two runs",
        model=" and ".join(dict.fromkeys((difference.first.model, difference.second.model))),
        headline=f"{_label_of_difference(worst)}: {worst.sentence}.",
        tiles=_diff_tiles(worst, changes),
        badge=_badge(worst),
        facts=[f"first: {difference.first.run}", f"second: {difference.second.run}"],
        table=_changes_table(changes[:_AT_THE_TOP], names),
        footnote=_left_out(changes),
        remarks=[
            *(f"{_label_of_difference(pair)}: {pair.sentence}" for pair in difference.pairs if pair is not worst),
            *(sentence for pair in difference.pairs for sentence in _lengths(pair)),
        ],
        sections=_diff_sections(difference, changes, names),
        screen=_diff_screen(difference, worst),
    )


def _diff_sections(difference: Difference, changes: Sequence[ChangeInStages], names: tuple[str, str]) -> list[Section]:
    sections = [_pair_section(number, pair, names) for number, pair in enumerate(difference.pairs, start=1)]
    if len(changes) > _AT_THE_TOP:
        rest = _changes_table(changes[_AT_THE_TOP:], names)
        sections.append(
            Section("changed", "What else changed", "What both sides applied, versions and hardware.", [rest])
        )
    return [*sections, _runs(difference)]


def _diff_screen(difference: Difference, worst: PairDifference) -> list[Table | Lines]:
    """Which runs these are, every pair with its metrics and its deviation by position, and what changed."""
    first, second = difference.first, difference.second
    blocks: list[Table | Lines] = [
        Lines(
            [
                f"first:  {first.run} ({first.model}, {first.created_at})",
                f"second: {second.run} ({second.model}, {second.created_at})",
                *_rescoring(difference),
            ],
            "dim",
            follows=True,
        )
    ]
    for pair in sorted(difference.pairs, key=lambda pair: pair is not worst):
        blocks += _pair_on_screen(pair, is_headline=pair is worst)
    changes = "changed:" if difference.changes else "changed: nothing that the manifests record"
    only = (("first", difference.only_first), ("second", difference.only_second))
    lines = [changes, *_change_sentences(difference.changes)]
    return [
        *blocks,
        Lines([*lines, *(f"only in the {which} run: {', '.join(pairs)}" for which, pairs in only if pairs)]),
    ]


def _rescoring(difference: Difference) -> list[str]:
    if difference.rescored_with is None:
        return []
    return [f"        the first run's responses with the settings of {difference.rescored_with}; mu by prefill in both"]


def _pair_on_screen(pair: PairDifference, *, is_headline: bool) -> list[Table | Lines]:
    """The sentence stands above already where it is the headline."""
    sentence = [] if is_headline else [Lines([f"{_label_of_difference(pair)}: {pair.sentence}"], "bold")]
    about = f"{pair.comparison}: {_sample(pair)}"
    move = [
        f"{side} moved by {write_estimate(move)} nats a token between the runs, on the same tokens"
        for side, move in pair.moved.items()
    ]
    bins = [(bin_.tokens, bin_.abs_logprob_diff) for bin_ in pair.by_position]
    return [
        *sentence,
        Lines([about], "dim", follows=bool(sentence)),
        Lines([*_lengths(pair), *move], follows=True),
        _metrics("", "metric", _main_metrics(pair), ("first", "second"), ""),
        _metrics("", "abs(d) at positions", bins, ("first", "second"), ""),
    ]


def _sample(pair: PairDifference) -> str:
    if not pair.shared_responses and not pair.shared_prompts:
        return "no prompt is in both runs"
    return (
        f"{write_count(pair.same_responses)} of {write_count(pair.shared_responses)} shared responses have the same "
        f"token ids; {write_many(pair.shared_prompts, 'prompt')} shared"
    )


def _lengths(pair: PairDifference) -> list[str]:
    """That the responses of one run are longer, which changes metrics of whole responses whatever the settings do."""
    first, second = (_mean_length(counts) for counts in (pair.first_counts, pair.second_counts))
    if not first or not second or max(first, second) < _OTHER_LENGTH * min(first, second):
        return []
    return [
        f"{_label_of_difference(pair)}: responses have {write_count(round(first))} tokens on average in the first run "
        f"and {write_count(round(second))} in the second; what grows with length differs by that alone"
    ]


def _mean_length(counts: Counts) -> float:
    return counts.num_tokens / counts.num_sequences if counts.num_sequences else 0.0


def _change_sentences(changes: Sequence[Change]) -> list[str]:
    """One line for each change; what changed alike in several stages stands once."""
    return [
        f"  {change} in {_stages_in_words(stages)}" if stages else f"  {change.kind}: {change}"
        for change, stages in _without_repeats(changes)
    ]


def _without_repeats(changes: Iterable[Change]) -> list[ChangeInStages]:
    """Each change, and where it is one of what both sides really applied, the stages in which it is the same; its name
    is then that of the setting alone.
    """
    stages: dict[tuple[str, str, str, str], list[str]] = {}
    for change in changes:
        stage, _, setting = change.name.partition(".")
        is_applied = change.kind == APPLIED
        key = (change.kind, setting if is_applied else change.name, change.first, change.second)
        stages.setdefault(key, []).extend([stage] if is_applied else [])
    return [
        (Change(kind=kind, name=name, first=first, second=second), where)
        for (kind, name, first, second), where in stages.items()
    ]


def _stages_in_words(stages: Sequence[str]) -> str:
    """`sample-bf16 and 2 other stages`."""
    others = len(stages) - 1
    return stages[0] + (f" and {others} other stage{'s' if others > 1 else ''}" if others else "")


def _left_out(changes: Sequence[ChangeInStages]) -> str:
    more = len(changes) - _AT_THE_TOP
    rest = f" {write_count(more)} more changes stand below." if more > 0 else ""
    return f"Read from the manifests of both runs; when and where they were made is left out.{rest}"


def _of_all_changes(number: int) -> str:
    return f"of {write_many(number, 'change')} in all" if number else "nothing changed that the manifests record"


def _diff_tiles(pair: PairDifference, changes: Sequence[ChangeInStages]) -> list[Tile]:
    metric, is_paired = pair.metrics["abs_logprob_diff"], pair.comparison == "paired"
    ratio = write_estimate(metric.ratio)
    same = f"{write_count(pair.same_responses)} of {write_count(pair.shared_responses)}"
    settings = sum(change.kind == "settings" for change, _ in changes)
    return [
        Tile(f"{_label_of_difference(pair)}: mean |d|, second / first", ratio.value, _reading_of_metric(metric)),
        Tile("Settings that changed", write_count(settings), _of_all_changes(len(changes))),
        Tile(
            "Responses with the same token ids",
            same,
            "compared in pairs" if is_paired else f"two samples; {write_many(pair.shared_prompts, 'prompt')} shared",
        ),
    ]


def _reading_of_metric(metric: MetricDifference) -> str:
    ratio = metric.ratio
    if ratio is None or ratio.low is None or ratio.high is None:
        return "no interval, so no answer"
    holds_1 = ratio.low <= 1 <= ratio.high
    meaning = "no difference can be seen: the interval holds 1" if holds_1 else "the interval leaves 1 out"
    return f"{write_estimate(ratio).interval}; {meaning}"


def _badge(pair: PairDifference) -> Badge:
    if pair.no_ratio:
        return Badge("broken", "no ratio")
    ratio = pair.metrics["abs_logprob_diff"].ratio
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return Badge("undecided", "no difference can be seen")
    return Badge("bug", "the second is worse") if ratio.value > 1 else Badge("clean", "the second is better")


def _changes_table(changes: Sequence[ChangeInStages], names: tuple[str, str]) -> Table:
    columns: list[Column[ChangeInStages]] = [
        Column("what", lambda row: Markup("<code>{}</code>").format(visible(row[0].name))),
        Column(
            "of", lambda row: f"{row[0].kind} in {_stages_in_words(row[1])}" if row[1] else row[0].kind, is_text=True
        ),
        Column(names[0], lambda row: row[0].first, is_text=True),
        Column(names[1], lambda row: row[0].second, is_text=True),
    ]
    table = Table.of("What changed", changes, columns, is_stacked=True)
    return table if changes else replace(table, rows=[["nothing that the manifests record", "", "", ""]])


def _rank(change: Change) -> int:
    return _KINDS_FIRST.index(change.kind) if change.kind in _KINDS_FIRST else len(_KINDS_FIRST)


def _pair_section(number: int, pair: PairDifference, names: tuple[str, str]) -> Section:
    blocks: list[Block] = [
        Finding(f"pair-{number}-answer", _label_of_difference(pair), _badge(pair), f"{capital(pair.sentence)}.", [])
    ]
    if pair.moved:
        sides = {"pi": "the training path (pi)", "mu": "the engine (mu)"}
        moves = [
            f"{sides.get(side, side)}: {write_estimate(distance)} nats a token" for side, distance in pair.moved.items()
        ]
        blocks.append(
            Note("How far each side moved from its own log-probs of the other run, on the same tokens:", moves)
        )
    panels = [
        draw_ratios(
            Heading(
                f"plot-ratios-{number}",
                "Every metric: second / first",
                "; ".join(
                    f"{name} {write_estimate(metric.ratio)}" for name, metric in _main_metrics(pair) if metric.ratio
                ),
                "The dotted line is no change; a bar that crosses it shows no difference.",
            ),
            pair,
            SHOWN_METRICS,
        ),
        _bins(f"plot-position-{number}", "By position", pair, names, by_length=False),
    ]
    if len(pair.by_response_length) > 1:
        panels.append(_bins(f"plot-length-{number}", "By length of the response", pair, names, by_length=True))
    blocks.append(
        Figure(
            f"figure-pair-{number}",
            "How to read it: bands and bars are intervals clustered by prompt. Point at a mark for its values.",
            panels,
            [
                _metrics("Metrics in both runs", "metric", _main_metrics(pair), names, ABSENT, as_code=True),
                _metrics("Every metric", "metric", list(pair.metrics.items()), names, ABSENT, as_code=True),
            ],
            key=[(names[0], FIRST), (names[1], SECOND)],
        )
    )
    lede = f"{capital(pair.comparison)}: {_sample(pair)}."
    return Section(f"pair-{number}", f"What it did: {_label_of_difference(pair)}", lede, blocks)


def _bins(anchor: str, title: str, pair: PairDifference, names: tuple[str, str], *, by_length: bool) -> Panel:
    bins = pair.by_response_length if by_length else pair.by_position
    label = "length of the response, tokens" if by_length else "position in the response, tokens"
    description = "; ".join(
        f"tokens {bin_.tokens}: {write_estimate(bin_.abs_logprob_diff.first)} and "
        f"{write_estimate(bin_.abs_logprob_diff.second)}"
        for bin_ in bins
    )
    return draw_bins(Heading(anchor, title, description, "Mean |d| of a token, both runs."), bins, names, label)


def _main_metrics(pair: PairDifference) -> list[tuple[str, MetricDifference]]:
    return [(name, pair.metrics[name]) for name in SHOWN_METRICS if name in pair.metrics]


def _metrics(
    caption: str,
    title: str,
    metrics: Sequence[NamedMetric],
    names: tuple[str, str],
    no_ratio: str,
    *,
    as_code: bool = False,
) -> Table:
    """`title`: of the first column, whose names a page sets as code. no_ratio: in place of a ratio that is absent."""

    def name(row: NamedMetric) -> Cell:
        return Markup("<code>{}</code>").format(visible(row[0])) if as_code else row[0]

    columns: list[Column[NamedMetric]] = [
        Column(title, name),
        Column(names[0], lambda row: write_estimate(row[1].first), can_lack_interval=True),
        Column(names[1], lambda row: write_estimate(row[1].second), can_lack_interval=True),
        Column("difference", lambda row: write_estimate(row[1].difference)),
        Column("ratio", lambda row: no_ratio if row[1].ratio is None else write_estimate(row[1].ratio)),
    ]
    return Table.of(caption, metrics, columns)


def _runs(difference: Difference) -> Section:
    columns: list[Column[tuple[str, DifferenceSide]]] = [
        Column("run", lambda row: row[0]),
        Column("folder", lambda row: visible(row[1].run), is_text=True),
        Column("model", lambda row: visible(row[1].model), is_text=True),
        Column("fingerprint", lambda row: visible(row[1].model_fingerprint), is_text=True),
        Column("made", lambda row: row[1].created_at, is_text=True),
        Column("by version", lambda row: row[1].tool_version, is_text=True),
    ]
    runs = [("first", difference.first), ("second", difference.second)]
    blocks: list[Block] = [Table.of("The two runs", runs, columns, is_stacked=True)]
    if difference.rescored_with is not None:
        blocks.append(
            Note(
                f"The second run is the first run's responses scored with the settings of {difference.rescored_with}; "
                "the engine's log-probs are those of a prefill in both."
            )
        )
    for which, names in (("first", difference.only_first), ("second", difference.only_second)):
        if names:
            blocks.append(Note(f"Only in the {which} run: {', '.join(names)}."))
    return Section("runs", "The two runs", "", blocks)


def _run_names(difference: Difference) -> tuple[str, str]:
    """Of their folders, or `first` and `second` where these have one name."""
    first, second = (PurePath(side.run).name for side in (difference.first, difference.second))
    return (first, second) if first and second and first != second else ("first", "second")


def _label_of_difference(pair: PairDifference) -> str:
    labels = dict.fromkeys(sides_label(*name.partition("/")[::2]) for name in (pair.first_pair, pair.second_pair))
    return " to ".join(labels)
