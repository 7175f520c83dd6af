"""Two runs on one screen; plain lines where the output is no terminal."""

from collections.abc import Sequence

from rich.console import Console

from mismatch_probe.difference.changes import Change, Difference, MetricDifference, PairDifference, places, told_once
from mismatch_probe.notation import write_count, write_estimate, write_many
from mismatch_probe.report.screen import print_fitting, print_line
from mismatch_probe.report.view import Cell, Table

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
