"""Deviation against length: the curves, the fitted law and the length budget."""

from collections.abc import Callable, Sequence

from mismatch_probe.notation import (
    ABSENT,
    write_count,
    write_estimate,
    write_number,
    write_range,
    write_token_count,
    write_tokens,
)
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures import length as drawing
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, StyleOf, pair_label, pair_styles
from mismatch_probe.report.pairs import budget
from mismatch_probe.report.view import Block, Cell, Column, Figure, Heading, Note, Section, Table, absences, with_values
from mismatch_probe.stats.results import AtLength, CurveBin, LengthLaw

_UP_TO = "up to token"

Shown = Sequence[tuple[PairSummary, LengthLaw]]


def length(summary: Summary) -> Section:
    shown = [(pair, pair.length) for pair in summary.pairs if pair.length]
    blocks: list[Block] = [_curves(shown, pair_styles(summary.pairs)), _law(shown)] if shown else []
    blocks += [Note(f"{pair_label(pair)}: no length law could be fitted.") for pair in summary.pairs if not pair.length]
    if absent := absences([(pair_label(pair), law.unavailable) for pair, law in shown]):
        blocks.append(absent)
    if len(shown) > DETAILED_PAIRS:
        blocks.append(Note(MORE_PAIRS_NOTE))
    return Section(
        "length",
        "Deviation against length",
        "The deviations of a response add up: S is the sum of d from its first token, and exp(S) is the importance "
        "weight of the whole response.",
        blocks,
    )


def _curves(shown: Shown, style_of: StyleOf) -> Figure:
    by_position = [(pair, law.abs_diff_by_position) for pair, law in shown]
    by_length = [(pair, law.abs_diff_by_response_length) for pair, law in shown]
    panels = [
        drawing.draw_size(
            Heading(
                "length-position",
                "Mean |d| by position",
                _trend(by_position),
                "Flat means that every position errs alike; growth points at positions, caches or rounded buffers.",
            ),
            by_position,
            "position in the response, tokens",
            style_of,
        ),
        drawing.draw_size(
            Heading(
                "length-response",
                "Mean |d| by response length",
                _trend(by_length),
                "Flat means that long responses are not made of worse tokens; then only the sum grows.",
            ),
            by_length,
            "response length T, tokens",
            style_of,
        ),
        drawing.draw_cumulative(
            Heading(
                "length-cumulative",
                "Cumulative S by position",
                drift_sentence(shown),
                "Mean over the responses that are as long. Tokens are sampled from mu, so S is expected to fall by "
                "the KL at every token; the thin straight line is the fitted drift.",
            ),
            shown,
            style_of,
        ),
    ]
    with_budget = [(pair, law) for pair, law in shown if budget(pair).value != ABSENT]
    fitted = [(pair, law) for pair, law in with_budget if law.budget_tokens and law.fitted_ess]
    if fitted:
        panels.append(drawing.draw_budget(_budget_heading(fitted), fitted, style_of))
    kinds: list[tuple[str, str, Callable[[LengthLaw], list[CurveBin]]]] = [
        ("|d| by position", "tokens", lambda law: law.abs_diff_by_position),
        ("|d| by response length", "lengths", lambda law: law.abs_diff_by_response_length),
        ("cumulative S by position", _UP_TO, lambda law: law.cumulative_diff_by_position),
    ]
    tables = [
        bins_table(f"{pair_label(pair)}: {title}", first, bins(law))
        for title, first, bins in kinds
        for pair, law in shown[:DETAILED_PAIRS]
        if bins(law)
    ]
    return Figure(
        "figure-length",
        "How to read it: lines are means, the dense band around them their interval, the faint band p50 to p90. "
        f"Bins that fewer than {drawing.FEWEST_RESPONSES} responses reach are left to the table.",
        panels,
        tables + [_measured(pair, law) for pair, law in fitted[:DETAILED_PAIRS] if law.ess_by_length],
        key=[(pair_label(pair), style_of(pair)) for pair, _ in shown],
    )


def _budget_heading(fitted: Shown) -> Heading:
    return Heading(
        "length-budget",
        "How many samples still count",
        "; ".join(f"{pair_label(pair)}: length budget {budget(pair)} tokens" for pair, _ in fitted),
        "ESS is the share of whole-response samples that still count after importance weighting. The mark is the "
        f"length budget T*, where it falls to {fitted[0][1].budget_ess:g}; the line is dotted beyond the longest "
        "response measured; hollow marks were measured on the first T tokens.",
    )


def _law(shown: Shown) -> Table:
    rows: list[tuple[str, Callable[[PairSummary, LengthLaw], Cell]]] = [
        ("drift of S, nats per 1,000 tokens", lambda _, law: write_estimate(law.drift_per_1000)),
        ("spread a", lambda _, law: write_estimate(law.spread_coefficient)),
        ("exponent b", lambda _, law: write_estimate(law.spread_exponent)),
        ("fitted on lengths", lambda _, law: _fitted_range(law)),
        ("length budget T*, tokens", lambda pair, _: budget(pair)),
        ("ESS measured at T*", lambda _, law: write_estimate(law.ess_at_budget)),
        ("closed form ln(1 / ESS) / (2 KL)", lambda _, law: write_tokens(law.budget_closed_form)),
        ("longest response", lambda _, law: write_count(law.measured_up_to)),
        ("median response", lambda _, law: write_token_count(law.median_response)),
    ]
    columns: list[Column[tuple[str, Callable[[PairSummary, LengthLaw], Cell]]]] = [
        Column("", lambda row: row[0]),
        *Column.each(shown, lambda of: pair_label(of[0]), lambda of, row: row[1](*of)),
    ]
    table = Table.of(
        "The fitted law Var(S | T) = a τ^b",
        rows,
        columns,
        reading="τ counts the first T tokens by how far their positions err, so that b near 1 is independent errors "
        "and b near 2 a bias of each response. A star marks a budget beyond the data, where later tokens are taken to "
        "err as the last ones do, a dagger one by the closed form.",
        stacked=True,
    )
    return with_values(table)


def _fitted_range(law: LengthLaw) -> str:
    if law.fitted_from is None or law.fitted_up_to is None:
        return ABSENT
    return f"{write_count(law.fitted_from)} to {write_count(law.fitted_up_to)}"


def _measured(pair: PairSummary, law: LengthLaw) -> Table:
    columns: list[Column[AtLength]] = [
        Column("T", lambda point: write_count(point.num_tokens)),
        Column("ESS", lambda point: write_estimate(point.estimate)),
        Column("responses", lambda point: write_count(point.estimate.num_sequences)),
    ]
    return Table.of(f"{pair_label(pair)}: ESS measured on the first T tokens", law.ess_by_length, columns)


def drift_sentence(shown: Shown) -> str:
    return "; ".join(
        f"{pair_label(pair)} drifts by {write_estimate(law.drift_per_1000)} nats per 1,000 tokens"
        for pair, law in shown
    )


def bins_table(caption: str, first: str, bins: Sequence[CurveBin]) -> Table:
    """`first` names what the bins are of; bins of sums up to a token are named by that token."""
    columns: list[Column[CurveBin]] = [
        Column(first, lambda bin_: write_count(round(bin_.high)) if first == _UP_TO else write_range(bin_)),
        Column("mean", lambda bin_: write_estimate(bin_.mean)),
        Column("p50", lambda bin_: write_number(bin_.p50)),
        Column("p90", lambda bin_: write_number(bin_.p90)),
        Column("p99", lambda bin_: write_number(bin_.p99)),
        Column("responses", lambda bin_: write_count(bin_.mean.num_sequences)),
        Column("tokens", lambda bin_: write_count(bin_.mean.num_tokens)),
    ]
    return Table.of(caption, bins, columns)


def _trend(curves: Sequence[tuple[PairSummary, Sequence[CurveBin]]]) -> str:
    return "; ".join(
        f"{pair_label(pair)} goes from {write_estimate(bins[0].mean)} to {write_estimate(bins[-1].mean)}"
        for pair, bins in curves
        if bins
    )
