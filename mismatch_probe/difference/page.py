"""Two runs on one page and on one screen: what changed, what it did, and both in every figure."""

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final

from markupsafe import Markup
from rich.console import Console

from mismatch_probe.difference.changes import (
    APPLIED,
    Change,
    Difference,
    MetricDifference,
    PairDifference,
    places,
    told_once,
)
from mismatch_probe.difference.drawing import FIRST, SECOND, draw_bins, draw_ratios
from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import ABSENT, write_count, write_estimate, write_many
from mismatch_probe.records.atomic import write_text
from mismatch_probe.report.names import visible
from mismatch_probe.report.rendering import PlotlyJs, rendered_page
from mismatch_probe.report.screen import print_fitting, print_line
from mismatch_probe.report.view import (
    Badge,
    Block,
    Cell,
    Figure,
    Finding,
    Heading,
    Note,
    Overview,
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


def render_difference(difference: Difference, console: Console) -> None:
    """What changed, then every pair: its sentence, its metrics, and its deviation by position."""
    print_line(console, f"first:  {difference.first.run} ({difference.first.model}, {difference.first.created_at})")
    print_line(console, f"second: {difference.second.run} ({difference.second.model}, {difference.second.created_at})")
    if difference.rescored_with is not None:
        print_line(
            console,
            f"        the first run's responses with the settings of {difference.rescored_with}; mu by prefill in both",
        )
    print_line(console, "changed: nothing that the manifests record" if not difference.changes else "changed:")
    for line in _changed(difference.changes):
        print_line(console, f"  {line}")
    for pair in difference.pairs:
        _render_pair(pair, console)
    for which, names in (("first", difference.only_first), ("second", difference.only_second)):
        if names:
            print_line(console, f"only in the {which} run: {', '.join(names)}")


def _changed(changes: Sequence[Change]) -> list[str]:
    """One line for each change; what changed alike in several stages is said once."""
    return [
        f"{change} in {places(stages)}" if stages else f"{change.kind}: {change}"
        for change, stages in told_once(changes)
    ]


def _render_pair(pair: PairDifference, console: Console) -> None:
    names = dict.fromkeys((pair.first_pair, pair.second_pair))
    print_line(console, "")
    print_line(console, f"{' -> '.join(names)}: {pair.sentence}", style="bold")
    print_line(
        console,
        f"{pair.comparison}: {write_count(pair.same_responses)} of {write_count(pair.shared_responses)} shared "
        f"responses have the same token ids; {write_many(pair.shared_prompts, 'prompt')} shared",
        style="dim",
    )
    for side, moved in pair.moved.items():
        print_line(
            console, f"{side} moved by {write_estimate(moved)} nats a token between the runs, on the same tokens"
        )
    shown = [(name, pair.metrics[name]) for name in SHOWN_METRICS if name in pair.metrics]
    _table("metric", shown, console)
    _table("abs(d) at positions", [(bin_.tokens, bin_.abs_logprob_diff) for bin_ in pair.by_position], console)


def _table(title: str, rows: Sequence[tuple[str, MetricDifference]], console: Console) -> None:
    cells: list[list[Cell]] = [
        [
            name,
            *(write_estimate(number) for number in (metric.first, metric.second, metric.difference)),
            "" if metric.ratio is None else write_estimate(metric.ratio),
        ]
        for name, metric in rows
    ]
    table = Table("", [title, "first", "second", "difference", "ratio"], cells)
    print_line(console, "")
    print_fitting(console, table, can_lack={1, 2})


_KINDS_FIRST: Final = ("settings", APPLIED, "model", "versions", "hardware", "git")
_AT_THE_TOP: Final = 8
_WORST_FIRST: Final = ("bug", "broken", "undecided", "clean")


def write_difference(difference: Difference, path: Path, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> None:
    """
    Raises:
        StorageError: the disk refused the write.
    """
    write_text(path, render_difference_page(difference, plotly_js))


def render_difference_page(difference: Difference, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """HTML; the same difference gives the same bytes."""
    names = _names(difference)
    changes = sorted(told_once(difference.changes), key=lambda change: _rank(change[0]))
    sections = [_pair_section(number, pair, names) for number, pair in enumerate(difference.pairs, start=1)]
    if len(changes) > _AT_THE_TOP:
        rest = _changes_table(changes[_AT_THE_TOP:], names)
        sections.append(
            Section("changed", "What else changed", "What both sides applied, versions and hardware.", [rest])
        )
    return rendered_page(
        plotly_js,
        tool_version=difference.tool_version,
        overview=_overview(difference, changes, names),
        sections=[*sections, _runs(difference)],
        sources=["the two run directories"],
        embedded=difference.model_dump(mode="json"),
    )


def _overview(difference: Difference, changes: Sequence[tuple[Change, list[str]]], names: tuple[str, str]) -> Overview:
    worst = min(difference.pairs, key=lambda pair: _WORST_FIRST.index(_badge(pair).kind))
    return Overview(
        subject="difference of two runs",
        model=" and ".join(dict.fromkeys((difference.first.model, difference.second.model))),
        headline=f"{_label(worst)}: {worst.sentence}.",
        tiles=_tiles(worst, changes),
        badge=_badge(worst),
        facts=[f"first: {difference.first.run}", f"second: {difference.second.run}"],
        advice=[],
        table=_changes_table(changes[:_AT_THE_TOP], names),
        footnote=_left_out(changes),
        contrasts=[f"{_label(pair)}: {pair.sentence}" for pair in difference.pairs if pair is not worst],
        figure=None,
    )


def _left_out(changes: Sequence[tuple[Change, list[str]]]) -> str:
    more = len(changes) - _AT_THE_TOP
    left = f" {write_count(more)} more changes stand below." if more > 0 else ""
    return f"Read from the manifests of both runs; when and where they were made is left out.{left}"


def _tiles(pair: PairDifference, changes: Sequence[tuple[Change, list[str]]]) -> list[Tile]:
    moved, paired = pair.metrics["abs_logprob_diff"], pair.comparison == "paired"
    ratio = write_estimate(moved.ratio)
    same = f"{write_count(pair.same_responses)} of {write_count(pair.shared_responses)}"
    settings = sum(change.kind == "settings" for change, _ in changes)
    return [
        Tile(f"{_label(pair)}: mean |d|, second / first", ratio.value, _reading(moved)),
        Tile("Settings that changed", write_count(settings), f"of {write_count(len(changes))} changes in all"),
        Tile(
            "Responses with the same token ids",
            same,
            "compared in pairs" if paired else f"two samples; {write_many(pair.shared_prompts, 'prompt')} shared",
        ),
    ]


def _reading(metric: MetricDifference) -> str:
    ratio = metric.ratio
    if ratio is None or ratio.low is None or ratio.high is None:
        return "no interval, so nothing is said of it"
    told = (
        "no difference can be told: the interval holds 1"
        if ratio.low <= 1 <= ratio.high
        else "the interval leaves 1 out"
    )
    return f"{write_estimate(ratio).interval}; {told}"


def _badge(pair: PairDifference) -> Badge:
    if pair.no_ratio:
        return Badge("broken", "no ratio")
    ratio = pair.metrics["abs_logprob_diff"].ratio
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return Badge("undecided", "no difference can be told")
    return Badge("bug", "the second is worse") if ratio.value > 1 else Badge("clean", "the second is better")


def _changes_table(changes: Sequence[tuple[Change, list[str]]], names: tuple[str, str]) -> Table:
    rows: list[list[Cell]] = [
        [
            Markup("<code>{}</code>").format(visible(change.name)),
            f"{change.kind} in {places(stages)}" if stages else change.kind,
            visible(change.first),
            visible(change.second),
        ]
        for change, stages in changes
    ]
    rows = rows or [["nothing that the manifests record", "", "", ""]]
    return Table("What changed", ["what", "of", *names], rows, text_columns=frozenset({1, 2, 3}), stacked=True)


def _rank(change: Change) -> int:
    return _KINDS_FIRST.index(change.kind) if change.kind in _KINDS_FIRST else len(_KINDS_FIRST)


def _pair_section(number: int, pair: PairDifference, names: tuple[str, str]) -> Section:
    blocks: list[Block] = [
        Finding(f"pair-{number}-answer", _label(pair), _badge(pair), f"{_capital(pair.sentence)}.", [])
    ]
    if pair.moved:
        sides = {"pi": "the training path (pi)", "mu": "the engine (mu)"}
        moved = [f"{sides.get(side, side)}: {write_estimate(far)} nats a token" for side, far in pair.moved.items()]
        blocks.append(
            Note("How far each side moved from its own log-probs of the other run, on the same tokens:", moved)
        )
    panels = [
        draw_ratios(
            Heading(
                f"plot-ratios-{number}",
                "Every metric: second / first",
                "; ".join(f"{name} {write_estimate(metric.ratio)}" for name, metric in _shown(pair) if metric.ratio),
                "The dotted line is no change; a bar that crosses it tells no difference.",
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
                _metrics("Metrics in both runs", _shown(pair), names),
                _metrics("Every metric", list(pair.metrics.items()), names),
            ],
            key=[(names[0], FIRST), (names[1], SECOND)],
        )
    )
    lede = (
        f"{_capital(pair.comparison)}: {write_count(pair.same_responses)} of {write_count(pair.shared_responses)} "
        f"shared responses have the same token ids; {write_many(pair.shared_prompts, 'prompt')} shared."
    )
    return Section(f"pair-{number}", f"What it did: {_label(pair)}", lede, blocks)


def _bins(anchor: str, title: str, pair: PairDifference, names: tuple[str, str], *, by_length: bool) -> Panel:
    bins = pair.by_response_length if by_length else pair.by_position
    label = "length of the response, tokens" if by_length else "position in the response, tokens"
    told = "; ".join(
        f"tokens {bin_.tokens}: {write_estimate(bin_.abs_logprob_diff.first)} and "
        f"{write_estimate(bin_.abs_logprob_diff.second)}"
        for bin_ in bins
    )
    return draw_bins(Heading(anchor, title, told, "Mean |d| of a token, both runs."), bins, names, label)


def _shown(pair: PairDifference) -> list[tuple[str, MetricDifference]]:
    return [(name, pair.metrics[name]) for name in SHOWN_METRICS if name in pair.metrics]


def _metrics(caption: str, metrics: Sequence[tuple[str, MetricDifference]], names: tuple[str, str]) -> Table:
    rows: list[list[Cell]] = [
        [
            Markup("<code>{}</code>").format(visible(name)),
            *(write_estimate(each) for each in (metric.first, metric.second, metric.difference)),
            ABSENT if metric.ratio is None else write_estimate(metric.ratio),
        ]
        for name, metric in metrics
    ]
    return Table(caption, ["metric", *names, "difference", "ratio"], rows)


def _runs(difference: Difference) -> Section:
    rows: list[list[Cell]] = [
        [
            which,
            visible(side.run),
            visible(side.model),
            visible(side.model_fingerprint),
            side.created_at,
            side.tool_version,
        ]
        for which, side in (("first", difference.first), ("second", difference.second))
    ]
    columns = ["run", "folder", "model", "fingerprint", "made", "by version"]
    blocks: list[Block] = [Table("The two runs", columns, rows, text_columns=frozenset(range(1, 6)), stacked=True)]
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


def _names(difference: Difference) -> tuple[str, str]:
    """Of their folders, or `first` and `second` where these have one name."""
    first, second = (PurePath(side.run).name for side in (difference.first, difference.second))
    return (first, second) if first and second and first != second else ("first", "second")


def _label(pair: PairDifference) -> str:
    labels = dict.fromkeys(sides_label(*name.partition("/")[::2]) for name in (pair.first_pair, pair.second_pair))
    return " to ".join(labels)


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
