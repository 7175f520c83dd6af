"""Deviation against length: curves by position and by response length, the fitted law and the length budget."""

import math
from collections.abc import Callable, Sequence

from mismatch_probe.notation import (
    ABSENT,
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_range,
    write_token_count,
    write_tokens,
)
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    NUM_HEAT_LEVELS,
    SMALL,
    band,
    bound_axis,
    color,
    hover_estimate,
    limit_line,
    line,
    logarithmic,
    marks,
    panel,
    thin_line,
    titles,
    words_inside,
)
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, PairStyle, StyleOf, pair_label, pair_styles
from mismatch_probe.report.pairs import LAW_ANCHOR, budget
from mismatch_probe.report.view import (
    Block,
    Cell,
    Column,
    Drawing,
    Figure,
    Heading,
    Note,
    Panel,
    Section,
    Table,
    absences,
    with_values,
)
from mismatch_probe.stats.results import AtLength, ConfidenceCurve, CurveBin, LengthLaw

_UP_TO = "up to token"

Shown = Sequence[tuple[PairSummary, LengthLaw]]


def length(summary: Summary) -> Section:
    pairs = [(pair, pair.length) for pair in summary.pairs if pair.length]
    blocks: list[Block] = [_curves(pairs, pair_styles(summary.pairs)), _law(pairs)] if pairs else []
    blocks += [Note(f"{pair_label(pair)}: no length law could be fitted.") for pair in summary.pairs if not pair.length]
    if absent := absences([(pair_label(pair), law.unavailable) for pair, law in pairs]):
        blocks.append(absent)
    if len(pairs) > DETAILED_PAIRS:
        blocks.append(Note(MORE_PAIRS_NOTE))
    return Section(
        "length",
        "Deviation against length",
        "The deviations of a response add up: S is the sum of d from its first token, and exp(S) is the importance "
        "weight of the whole response.",
        blocks,
    )


def _curves(pairs: Shown, style_of: StyleOf) -> Figure:
    by_position = [(pair, law.abs_diff_by_position) for pair, law in pairs]
    by_length = [(pair, law.abs_diff_by_response_length) for pair, law in pairs]
    panels = [
        draw_size(
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
        draw_size(
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
        draw_cumulative(
            Heading(
                "length-cumulative",
                "Cumulative S by position",
                drift_sentence(pairs),
                "Mean over the responses that are as long. Tokens are sampled from mu, so S is expected to fall by "
                "the KL at every token; the thin straight line is the fitted drift.",
            ),
            pairs,
            style_of,
        ),
    ]
    with_budget = [(pair, law) for pair, law in pairs if budget(pair).value != ABSENT]
    pairs_with_fit = [(pair, law) for pair, law in with_budget if law.budget_tokens and law.fitted_ess]
    if pairs_with_fit:
        panels.append(draw_budget(_budget_heading(pairs_with_fit), pairs_with_fit, style_of))
    kinds: list[tuple[str, str, Callable[[LengthLaw], list[CurveBin]]]] = [
        ("|d| by position", "tokens", lambda law: law.abs_diff_by_position),
        ("|d| by response length", "lengths", lambda law: law.abs_diff_by_response_length),
        ("cumulative S by position", _UP_TO, lambda law: law.cumulative_diff_by_position),
    ]
    tables = [
        bins_table(f"{pair_label(pair)}: {title}", first, bins(law))
        for title, first, bins in kinds
        for pair, law in pairs[:DETAILED_PAIRS]
        if bins(law)
    ]
    return Figure(
        "figure-length",
        "How to read it: lines are means, the dense band around them their interval, the faint band p50 to p90. "
        f"Bins that fewer than {FEWEST_RESPONSES} responses reach are left to the table.",
        panels,
        tables + [_measured_lengths(pair, law) for pair, law in pairs_with_fit[:DETAILED_PAIRS] if law.ess_by_length],
        key=[(pair_label(pair), style_of(pair)) for pair, _ in pairs],
    )


def _budget_heading(pairs_with_fit: Shown) -> Heading:
    return Heading(
        "length-budget",
        "How many samples still count",
        "; ".join(f"{pair_label(pair)}: length budget {budget(pair)} tokens" for pair, _ in pairs_with_fit),
        "ESS is the share of whole-response samples that still count after importance weighting. The mark is the "
        f"length budget T*, where it falls to {pairs_with_fit[0][1].budget_ess:g}; the line is dotted beyond the "
        "longest response measured; hollow marks were measured on the first T tokens.",
    )


def _law(pairs: Shown) -> Table:
    rows: list[tuple[str, Callable[[PairSummary, LengthLaw], Cell]]] = [
        ("drift of S, nats per 1,000 tokens", lambda _, law: write_estimate(law.drift_per_1000)),
        ("spread a", lambda _, law: write_estimate(law.spread_coefficient)),
        ("exponent b", lambda _, law: write_estimate(law.spread_exponent)),
        ("fitted on lengths", lambda _, law: _fitted_range(law)),
        ("length budget T*, tokens", lambda pair, _: budget(pair)),
        ("ESS measured at T*", lambda _, law: write_estimate(law.ess_at_budget)),
        ("for comparison: closed form ln(1 / ESS) / (2 KL)", lambda _, law: write_tokens(law.budget_closed_form)),
        ("longest response", lambda _, law: write_count(law.measured_up_to)),
        ("median response", lambda _, law: write_token_count(law.median_response)),
    ]
    columns: list[Column[tuple[str, Callable[[PairSummary, LengthLaw], Cell]]]] = [
        Column("", lambda row: row[0]),
        *Column.each(pairs, lambda of: pair_label(of[0]), lambda of, row: row[1](*of)),
    ]
    table = Table.of(
        "The fitted law Var(S | T) = a τ^b",
        rows,
        columns,
        reading="τ counts the first T tokens by how far their positions err, so that b near 1 is independent errors "
        "and b near 2 a bias of each response. A star marks a budget beyond the data, where later tokens are taken to "
        "err as the last ones do, a dagger one by the closed form. That takes errors for independent and "
        "normal, with the mean KL at every token; where nothing could be fitted, nothing shows that, and "
        "the interval reaches down to its square root, where errors that are alike throughout a response would end it. "
        "Where the two differ, T* is the "
        "budget, since it rests on the spread of S that was measured.",
        is_stacked=True,
        anchor=LAW_ANCHOR,
    )
    return with_values(table)


def _fitted_range(law: LengthLaw) -> str:
    if law.fitted_from is None or law.fitted_up_to is None:
        return ABSENT
    return f"{write_count(law.fitted_from)} to {write_count(law.fitted_up_to)}"


def _measured_lengths(pair: PairSummary, law: LengthLaw) -> Table:
    columns: list[Column[AtLength]] = [
        Column("T", lambda point: write_count(point.num_tokens)),
        Column("ESS", lambda point: write_estimate(point.estimate)),
        Column("responses", lambda point: write_count(point.estimate.num_sequences)),
    ]
    return Table.of(f"{pair_label(pair)}: ESS measured on the first T tokens", law.ess_by_length, columns)


def drift_sentence(pairs: Shown) -> str:
    return "; ".join(
        f"{pair_label(pair)} drifts by {write_estimate(law.drift_per_1000)} nats per 1,000 tokens"
        for pair, law in pairs
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


_BAND_ALPHA = 0.22
_SPREAD_ALPHA = 0.10
_FAINTEST_LINE = 4
FEWEST_RESPONSES = 8
_FEWEST_POINTS = 2
_TOP = 1.04


def draw_size(
    heading: Heading,
    curves: Sequence[tuple[PairSummary, Sequence[CurveBin]]],
    x_label: str,
    style_of: StyleOf,
) -> Panel:
    """Mean abs(d) on two logarithmic axes: line the mean, dense band its interval, faint band p50 to p90."""

    def on(figure: Drawing) -> None:
        titles(figure, x_label, "|d|, nats")
        for pair, bins in curves:
            positive = [bin_ for bin_ in _curve_of_enough_responses(bins) if bin_.mean.value > 0]
            if len(positive) < _FEWEST_POINTS:
                continue
            style = style_of(pair)
            x = [bin_.center for bin_ in positive]
            band(figure, x, [bin_.p50 for bin_ in positive], [bin_.p90 for bin_ in positive], style, _SPREAD_ALPHA)
            _draw_curve_with_interval(figure, pair_label(pair), positive, style)
        if figure.traces:
            bins_shown = [bin_ for _, bins in curves for bin_ in _curve_of_enough_responses(bins)]
            _token_axis(figure, [bin_.center for bin_ in bins_shown])
            logarithmic(figure, "y", [bin_.mean.value for bin_ in bins_shown], LEAST_SPAN)

    return panel(heading, on)


def draw_cumulative(heading: Heading, pairs: Sequence[tuple[PairSummary, LengthLaw]], style_of: StyleOf) -> Panel:
    """Mean of S up to each position with its interval, and the fitted drift as a thin line."""

    def on(figure: Drawing) -> None:
        titles(figure, "position in the response, tokens", "cumulative S, nats")
        for pair, law in pairs:
            bins = _curve_of_enough_responses(law.cumulative_diff_by_position)
            if not bins:
                continue
            style = style_of(pair)
            _draw_curve_with_interval(figure, pair_label(pair), bins, style)
            if law.drift_per_1000 is not None:
                end = max(bin_.high for bin_ in bins)
                thin_line(figure, [0, end], [0, law.drift_per_1000.value * end / 1000], style)
        if figure.traces:
            means = [
                bin_.mean for _, law in pairs for bin_ in _curve_of_enough_responses(law.cumulative_diff_by_position)
            ]
            bound_axis(figure, [mean.value for mean in means], [end for mean in means for end in (mean.low, mean.high)])
            figure.update_axis("y", zeroline=True, zerolinecolor=color("muted"))

    return panel(heading, on)


def _computed_points(law: LengthLaw) -> list[tuple[float, float]]:
    """Length and ESS by the fitted law. It is computed down to a share below the budget's, which lengths behind repeat:
    of these the first is kept.
    """
    points = [(point.num_tokens, point.ess) for point in law.fitted_ess]
    num_falling = sum(not math.isclose(ess, points[-1][1], rel_tol=1e-6) for _, ess in points)
    return points[: num_falling + 1]


def draw_budget(heading: Heading, pairs: Sequence[tuple[PairSummary, LengthLaw]], style_of: StyleOf) -> Panel:
    """The fitted law of ESS(T): solid where measured, dotted where extrapolated, marked at T*.

    Hollow marks with intervals are the ESS measured on the first T tokens. Every law given has a budget.
    """

    def on(figure: Drawing) -> None:
        titles(figure, "response length T, tokens", "share of samples that count (ESS)")
        for pair, law in pairs:
            assert law.budget_tokens is not None
            style, name = style_of(pair), pair_label(pair)
            points = _computed_points(law)
            num_measured = sum(num_tokens <= law.measured_up_to for num_tokens, _ in points)
            for part, dash in ((points[:num_measured], "solid"), (points[max(num_measured - 1, 0) :], "2px,2px")):
                thin_line(figure, [tokens for tokens, _ in part], [ess for _, ess in part], style, dash)
            _mark_points(figure, name, law.ess_by_length, style)
            budget = law.budget_tokens
            words = hover_estimate(name, f"length budget at ESS {law.budget_ess:g}", budget, "tokens")
            marks(figure, [budget.value], [law.budget_ess], style, [words], size=11)
        budget_ess = pairs[0][1].budget_ess
        limit_line(figure, budget_ess)
        words_inside(figure, f"ESS {budget_ess:g}", 0.005, budget_ess / _TOP)
        figure.update_axis("y", range=[0, _TOP])
        _token_axis(figure, [point.num_tokens for _, law in pairs for point in law.fitted_ess])

    return panel(heading, on)


def _draw_curve_with_interval(figure: Drawing, name: str, bins: Sequence[CurveBin], style: PairStyle) -> None:
    """Means with their interval."""
    x = [bin_.center for bin_ in bins]
    band(figure, x, [bin_.mean.low for bin_ in bins], [bin_.mean.high for bin_ in bins], style, _BAND_ALPHA)
    texts = [hover_estimate(name, f"tokens {write_range(bin_)}", bin_.mean, "nats") for bin_ in bins]
    line(figure, x, [bin_.mean.value for bin_ in bins], style, texts)


def _token_axis(figure: Drawing, tokens: Sequence[float]) -> None:
    logarithmic(figure, "x", tokens, is_count=True)


def _mark_points(figure: Drawing, name: str, points: Sequence[AtLength], style: PairStyle) -> None:
    estimates = [point.estimate for point in points]
    marks(
        figure,
        [point.num_tokens for point in points],
        [estimate.value for estimate in estimates],
        style,
        [
            hover_estimate(name, f"ESS on the first {write_many(point.num_tokens, 'token')}", point.estimate)
            for point in points
        ],
        size=6,
        hollow=True,
        low=[estimate.low for estimate in estimates],
        high=[estimate.high for estimate in estimates],
    )


def draw_by_confidence(heading: Heading, curves: Sequence[ConfidenceCurve]) -> Panel:
    """Mean abs(d) by position, one line a bin of confidence; the strongest line is the last bin."""

    def on(figure: Drawing) -> None:
        titles(figure, "position in the response, tokens", "mean |d|, nats")
        for curve in curves:
            positive = [bin_ for bin_ in _curve_of_enough_responses(curve.abs_diff_by_position) if bin_.mean.value > 0]
            name = f"{curve.low:g} to {curve.high:g}"
            texts = [hover_estimate(name, f"tokens {write_range(bin_)}", bin_.mean, "nats") for bin_ in positive]
            means = [bin_.mean.value for bin_ in positive]
            line(figure, [bin_.center for bin_ in positive], means, confidence_style(curve, curves), texts)
        if figure.traces:
            bins_shown = [bin_ for curve in curves for bin_ in _curve_of_enough_responses(curve.abs_diff_by_position)]
            _token_axis(figure, [bin_.center for bin_ in bins_shown])
            logarithmic(figure, "y", [bin_.mean.value for bin_ in bins_shown], LEAST_SPAN)

    return panel(heading, on, SMALL)


def confidence_style(curve: ConfidenceCurve, curves: Sequence[ConfidenceCurve]) -> PairStyle:
    """The higher the bin, the stronger the colour; dash and marker tell neighbours apart."""
    number = curves.index(curve)
    level = _FAINTEST_LINE + round((NUM_HEAT_LEVELS - _FAINTEST_LINE) * number / max(1, len(curves) - 1))
    return PairStyle(f"heat-{level}", ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))[number % 4], "os^D"[number % 4])


def _curve_of_enough_responses(bins: Sequence[CurveBin]) -> list[CurveBin]:
    """The bins that enough responses reach for a curve to mean something."""
    return [bin_ for bin_ in bins if bin_.mean.num_sequences >= FEWEST_RESPONSES]
