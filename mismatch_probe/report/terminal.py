"""The story on one screen, with the same strings as the page; plain text where the output is not a terminal."""

from pathlib import Path

from rich.console import Console

from mismatch_probe.notation import write_many
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.advice import with_advice_to_follow
from mismatch_probe.report.answer import facts, short_answer
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.pairs import (
    contrast_sentences,
    few_tokens_sentences,
    left_out_sentences,
    pairs_table,
    settings_sentences,
    table_footnote,
    tokens_left_out,
)
from mismatch_probe.report.screen import (
    print_advice,
    print_facts,
    print_fitting,
    print_line,
    print_room,
)
from mismatch_probe.verdict.headline import most_serious_first


def render_terminal(summary: Summary, console: Console, run: Path) -> None:
    """The answer, one row a pair, what another dtype would change, what it means, and what to do next with `run`."""
    filed = Findings(run).documents()
    print_room(console)
    print_line(console, short_answer(summary), style="bold")
    print_line(console, "")
    print_fitting(console, pairs_table(summary), can_lack={2})
    for line in (table_footnote(summary), *left_out_sentences(summary), *_troubles(summary)):
        if line:
            print_line(console, line, style="dim")
    print_line(console, "")
    for sentence in (*contrast_sentences(summary), *settings_sentences(summary), *few_tokens_sentences(summary)):
        print_line(console, sentence)
    print_facts(console, facts(summary, filed))
    print_line(console, "")
    followable = with_advice_to_follow(summary, run, filed)
    print_advice(console, [advice for pair in most_serious_first(followable.pairs) for advice in pair.verdict.advice])


def _troubles(summary: Summary) -> list[str]:
    """What was not usable, named per pair."""
    troubles = []
    for pair in summary.pairs:
        counts = pair.counts
        missing, nonfinite = counts.missing_mu + counts.missing_pi, counts.nonfinite_mu + counts.nonfinite_pi
        positive = counts.positive_mu + counts.positive_pi
        if counts.has_faults:
            troubles.append(
                f"{pair_label(pair)}: {write_many(missing, 'log-prob')} missing, {nonfinite:,} not finite, "
                f"{positive:,} above 0, "
                f"{write_many(counts.void_checks, 'response')} with void prefill or reference log-probs, "
                f"{counts.mismatched_ids:,} with other token ids; none of them is in the numbers above"
                f"{tokens_left_out(counts)}"
            )
    return troubles
