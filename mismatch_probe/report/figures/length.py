"""Deviation against length: curves by position and by response length, and what they do to importance sampling."""

from collections.abc import Sequence

from mismatch_probe.notation import write_many, write_range
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    NUM_HEAT_LEVELS,
    SMALL,
    band,
    bounded,
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
from mismatch_probe.report.names import PairStyle, StyleOf, pair_label
from mismatch_probe.report.view import Drawing, Heading, Panel
from mismatch_probe.stats.results import AtLength, ConfidenceCurve, CurveBin, LengthLaw

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
            positive = [bin_ for bin_ in _solid(bins) if bin_.mean.value > 0]
            if len(positive) < _FEWEST_POINTS:
                continue
            style = style_of(pair)
            x = [bin_.center for bin_ in positive]
            band(figure, x, [bin_.p50 for bin_ in positive], [bin_.p90 for bin_ in positive], style, _SPREAD_ALPHA)
            _curve(figure, pair_label(pair), positive, style)
        if figure.traces:
            shown = [bin_ for _, bins in curves for bin_ in _solid(bins)]
            _token_axis(figure, [bin_.center for bin_ in shown])
            logarithmic(figure, "y", [bin_.mean.value for bin_ in shown], LEAST_SPAN)

    return panel(heading, on)


def draw_cumulative(heading: Heading, pairs: Sequence[tuple[PairSummary, LengthLaw]], style_of: StyleOf) -> Panel:
    """Mean of S up to each position with its interval, and the fitted drift as a thin line."""

    def on(figure: Drawing) -> None:
        titles(figure, "position in the response, tokens", "cumulative S, nats")
        for pair, law in pairs:
            bins = _solid(law.cumulative_diff_by_position)
            if not bins:
                continue
            style = style_of(pair)
            _curve(figure, pair_label(pair), bins, style)
            if law.drift_per_1000 is not None:
                end = max(bin_.high for bin_ in bins)
                thin_line(figure, [0, end], [0, law.drift_per_1000.value * end / 1000], style)
        if figure.traces:
            means = [bin_.mean for _, law in pairs for bin_ in _solid(law.cumulative_diff_by_position)]
            bounded(figure, [mean.value for mean in means], [end for mean in means for end in (mean.low, mean.high)])
            figure.update_axis("y", zeroline=True, zerolinecolor=color("muted"))

    return panel(heading, on)


def draw_budget(heading: Heading, pairs: Sequence[tuple[PairSummary, LengthLaw]], style_of: StyleOf) -> Panel:
    """The fitted law of ESS(T): solid where measured, dotted where extrapolated, marked at T*.

    Hollow marks with intervals are the ESS measured on the first T tokens. Every law given has a budget.
    """

    def on(figure: Drawing) -> None:
        titles(figure, "response length T, tokens", "share of samples that count (ESS)")
        for pair, law in pairs:
            assert law.budget_tokens is not None
            style, name = style_of(pair), pair_label(pair)
            points = [(point.num_tokens, point.ess) for point in law.fitted_ess]
            seen = sum(num_tokens <= law.measured_up_to for num_tokens, _ in points)
            for part, dash in ((points[:seen], "solid"), (points[max(seen - 1, 0) :], "2px,2px")):
                thin_line(figure, [tokens for tokens, _ in part], [ess for _, ess in part], style, dash)
            _measured(figure, name, law.ess_by_length, style)
            budget = law.budget_tokens
            words = hover_estimate(name, f"length budget at ESS {law.budget_ess:g}", budget, "tokens")
            marks(figure, [budget.value], [law.budget_ess], style, [words], size=11)
        budget_ess = pairs[0][1].budget_ess
        limit_line(figure, budget_ess)
        words_inside(figure, f"ESS {budget_ess:g}", 0.005, budget_ess / _TOP)
        figure.update_axis("y", range=[0, _TOP])
        _token_axis(figure, [point.num_tokens for _, law in pairs for point in law.fitted_ess])

    return panel(heading, on)


def _curve(figure: Drawing, name: str, bins: Sequence[CurveBin], style: PairStyle) -> None:
    """Means with their interval."""
    x = [bin_.center for bin_ in bins]
    band(figure, x, [bin_.mean.low for bin_ in bins], [bin_.mean.high for bin_ in bins], style, _BAND_ALPHA)
    texts = [hover_estimate(name, f"tokens {write_range(bin_)}", bin_.mean, "nats") for bin_ in bins]
    line(figure, x, [bin_.mean.value for bin_ in bins], style, texts)


def _token_axis(figure: Drawing, tokens: Sequence[float]) -> None:
    logarithmic(figure, "x", tokens)
    figure.update_axis("x", exponentformat="SI")


def _measured(figure: Drawing, name: str, points: Sequence[AtLength], style: PairStyle) -> None:
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
            positive = [bin_ for bin_ in _solid(curve.abs_diff_by_position) if bin_.mean.value > 0]
            name = f"{curve.low:g} to {curve.high:g}"
            texts = [hover_estimate(name, f"tokens {write_range(bin_)}", bin_.mean, "nats") for bin_ in positive]
            means = [bin_.mean.value for bin_ in positive]
            line(figure, [bin_.center for bin_ in positive], means, confidence_style(curve, curves), texts)
        if figure.traces:
            shown = [bin_ for curve in curves for bin_ in _solid(curve.abs_diff_by_position)]
            _token_axis(figure, [bin_.center for bin_ in shown])
            logarithmic(figure, "y", [bin_.mean.value for bin_ in shown], LEAST_SPAN)

    return panel(heading, on, SMALL)


def confidence_style(curve: ConfidenceCurve, curves: Sequence[ConfidenceCurve]) -> PairStyle:
    """The higher the bin, the stronger the colour; dash and marker tell neighbours apart."""
    number = curves.index(curve)
    level = _FAINTEST_LINE + round((NUM_HEAT_LEVELS - _FAINTEST_LINE) * number / max(1, len(curves) - 1))
    return PairStyle(f"heat-{level}", ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))[number % 4], "os^D"[number % 4])


def _solid(bins: Sequence[CurveBin]) -> list[CurveBin]:
    """The bins that enough responses reach for a curve to mean something."""
    return [bin_ for bin_ in bins if bin_.mean.num_sequences >= FEWEST_RESPONSES]
