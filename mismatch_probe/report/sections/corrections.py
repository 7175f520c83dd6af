"""What each correction rule would leave of these rollouts, and how that changes with length."""

from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from mismatch_probe.notation import (
    ABSENT,
    join_names,
    write_count,
    write_estimate,
    write_many,
    write_percent,
)
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures.canvas import (
    SMALL,
    hover,
    limit_line,
    line,
    logarithmic,
    panel,
    titles,
    words_inside,
)
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, PairStyle, pair_key, pair_label, visible
from mismatch_probe.report.pairs import weights_tail_words
from mismatch_probe.report.view import Block, Column, Drawing, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.stats.results import CorrectionAtLength, CorrectionResult, Estimate

ENOUGH_LEFT = 0.5
"""Effective share of the sample from which a rule counts as one that this mismatch can carry."""

_TOO_FEW = " Too few responses are long enough for a drawing."
STYLES = {
    "token_weight": PairStyle("muted", (1.5, 1.5), "o"),
    "sequence_weight": PairStyle("ink", (), "o"),
    "sequence_truncate_3": PairStyle("truncate", (6, 2), "s"),
    "sequence_mask_3": PairStyle("mask", (6, 2, 1.5, 2), "D"),
    "sequence_reject_geometric_0.999_1.001": PairStyle("reject", (), "^"),
    "sequence_reject_k3_0.01": PairStyle("reject", (1.5, 1.5), "s"),
    "sequence_reject_k1_0.0001": PairStyle("reject", (6, 2), "D"),
}
"""The rules drawn, one of each kind: colour says what a rule does, dash and marker which it is."""
_TOP = 1.04


def corrections(summary: Summary) -> Section:
    pairs = [pair for pair in summary.pairs if pair.corrections]
    blocks: list[Block] = []
    if pairs:
        blocks.append(Note("What is left of the sample:", [_rules_that_fail(pair) for pair in pairs]))
        tails = [(pair_label(pair), weights_tail_words(pair)) for pair in pairs[:DETAILED_PAIRS]]
        if sentences := [f"{label}: {words}." for label, words in tails if words is not None]:
            blocks.append(Note("Whether means of the weights can be believed:", sentences))
        blocks.append(_correction_figure(pairs[:DETAILED_PAIRS]))
    else:
        blocks.append(Note("No token was measured, so no correction could be tried."))
    if len(pairs) > DETAILED_PAIRS:
        blocks.append(Note(MORE_PAIRS_NOTE))
    return Section(
        "corrections",
        "What corrections would leave",
        "Importance weighting and rejection rules of known trainers, applied to these rollouts. ESS is the effective "
        "sample size over what a rule keeps; the effective share counts what it rejects as lost too. Rules that look "
        "at the advantage are shown as if every advantage had the sign they act on.",
        blocks,
    )


def _correction_figure(pairs: Sequence[PairSummary]) -> Figure:
    """The effective share against length, with every rule in the tables under it."""
    long_enough = [pair for pair in pairs if any(rule.by_length for rule in pair.corrections)]
    panels = [_correction_panel(_heading(pair), pair.corrections, ENOUGH_LEFT) for pair in long_enough]
    tables = [_rules(pair) for pair in pairs] + [_by_length(pair) for pair in long_enough]
    names = {rule.name: rule_words(rule) for pair in pairs for rule in pair.corrections}
    return Figure(
        "figure-corrections",
        "How to read it: each line is one rule on the first T tokens of every response that has as many. A line that "
        "falls is a correction that long responses outgrow: what is left is too little to learn from below the dotted "
        "line. One rule of each kind is drawn; the tables hold all of them." + ("" if panels else _TOO_FEW),
        panels,
        tables,
        key=[(names[name], style) for name, style in STYLES.items() if panels and name in names],
        dense=True,
    )


def rule_words(rule: CorrectionResult) -> str:
    """`Seq-MIS at 3`: what people call a rule, and the numbers in its name."""
    numbers = [part for part in rule.name.split("_") if part.replace(".", "").isdigit()]
    name, comma, condition = rule.also_known_as.partition(",")
    return f"{name} at {' to '.join(numbers)}{comma}{condition}" if numbers else rule.also_known_as


def _heading(pair: PairSummary) -> Heading:
    ends = [
        f"{rule_words(rule)} leaves {write_percent(share_left(rule.by_length[-1]))}"
        for rule in pair.corrections
        if rule.name in STYLES and rule.by_length
    ]
    longest = max(bin_.num_tokens for rule in pair.corrections for bin_ in rule.by_length)
    return Heading(
        f"corrections-{pair_key(pair)}",
        f"{pair_label(pair)}, share left by length",
        f"On the first {write_many(longest, 'token')}: {'; '.join(ends)}.",
    )


def effective_share(rule: CorrectionResult) -> float:
    """ESS times the share kept, in the rule's own units; 0 where nothing is kept."""
    ess, rejected_share = _own_units(rule)
    return 0.0 if ess is None else ess.value * (1 - (rejected_share.value if rejected_share else 0))


def _own_units(rule: CorrectionResult) -> tuple[Estimate | None, Estimate | None]:
    if rule.level == "token":
        return rule.ess_token, rule.share_rejected_token
    return rule.ess_seq, rule.share_rejected_seq


def _rules_that_fail(pair: PairSummary) -> str:
    """Which rules leave at least half of the sample, and which do not, on whole responses or on their first tokens."""
    fails = [rule for rule in pair.corrections if effective_share(rule) < ENOUGH_LEFT]
    if not fails:
        of_all = f"{pair_label(pair)}: every rule leaves at least {write_percent(ENOUGH_LEFT)} of the whole responses"
        return f"{of_all}{_fails_on_first_tokens(pair)}."
    shares = groupby(fails, lambda rule: write_percent(effective_share(rule)))
    rule_names = ", ".join(f"{', '.join(map(rule_words, rules))} ({share})" for share, rules in shares)
    others = f"{len(pair.corrections) - len(fails)} of {len(pair.corrections)} rules leave more"
    return f"{pair_label(pair)}: less than {write_percent(ENOUGH_LEFT)} by {rule_names}; {others}."


def _fails_on_first_tokens(pair: PairSummary) -> str:
    """The rules that leave less than half at some length, each where it leaves least."""
    least = [
        (rule, min(rule.by_length, key=share_left))
        for rule in pair.corrections
        if rule.name in STYLES and rule.by_length
    ]
    fails = [
        f"{rule_words(rule)} leaves {write_percent(share_left(at))} of the first {write_count(at.num_tokens)} tokens"
        for rule, at in least
        if share_left(at) < ENOUGH_LEFT
    ]
    return f"; {join_names(fails)}" if fails else ""


def _rules(pair: PairSummary) -> Table:
    columns: list[Column[CorrectionResult]] = [
        Column("rule", _rule_name),
        Column("works on", lambda rule: f"{rule.level}s", is_text=True),
        Column("effective share", lambda rule: write_percent(effective_share(rule))),
        Column("ESS of what is kept", lambda rule: write_estimate(_own_units(rule)[0])),
        Column("share clipped", lambda rule: write_estimate(rule.share_clipped)),
        Column("share rejected", lambda rule: write_estimate(_own_units(rule)[1])),
        Column("mean weight", lambda rule: write_estimate(rule.mean_weight)),
        Column("bias of the weight", lambda rule: write_estimate(rule.bias)),
        Column("mean |weight error|", lambda rule: write_estimate(rule.abs_weight_error)),
    ]
    return Table.of(f"Rules on {pair_label(pair)}", pair.corrections, columns, is_stacked=True)


def _rule_name(rule: CorrectionResult) -> Markup:
    return Markup('<code>{}</code><span class="meaning">{}</span>').format(
        visible(rule.name), visible(rule.also_known_as)
    )


def _by_length(pair: PairSummary) -> Table:
    """Effective share on the first tokens of every response that has as many."""
    lengths = sorted({bin_.num_tokens for rule in pair.corrections for bin_ in rule.by_length})

    def share(length: int, rule: CorrectionResult) -> str:
        return next((write_percent(share_left(at)) for at in rule.by_length if at.num_tokens == length), ABSENT)

    columns: list[Column[CorrectionResult]] = [
        Column("rule", lambda rule: Markup("<code>{}</code>").format(visible(rule.name))),
        *Column.each(lengths, write_count, share),
    ]
    return Table.of(f"Effective share on the first T tokens, {pair_label(pair)}", pair.corrections, columns)


def share_left(at: CorrectionAtLength) -> float:
    """ESS times the share kept; 0 where nothing is kept."""
    return (at.ess or 0.0) * (1 - at.share_rejected)


def _correction_panel(heading: Heading, rules: Sequence[CorrectionResult], enough: float) -> Panel:
    """The share each drawn rule leaves on the first T tokens, against T; a dotted line at `enough`."""

    def on(figure: Drawing) -> None:
        titles(figure, "first T tokens of a response", "share of the sample left")
        for rule in rules:
            if rule.name in STYLES and rule.by_length:
                lengths = [float(bin_.num_tokens) for bin_ in rule.by_length]
                texts = [_hover_of_rule(rule, bin_) for bin_ in rule.by_length]
                line(figure, lengths, [share_left(bin_) for bin_ in rule.by_length], STYLES[rule.name], texts)
        if not figure.traces:
            return
        limit_line(figure, enough)
        figure.update_axis("y", range=[0, _TOP])
        words_inside(figure, write_percent(enough), 0.995, enough / _TOP, right=True)
        logarithmic(figure, "x", [bin_.num_tokens for rule in rules for bin_ in rule.by_length], is_count=True)

    return panel(heading, on, SMALL)


def _hover_of_rule(rule: CorrectionResult, at: CorrectionAtLength) -> str:
    return hover(
        rule_words(rule),
        f"first {write_many(at.num_tokens, 'token')}",
        f"{write_percent(share_left(at))} left",
        write_many(at.num_sequences, "response"),
    )
