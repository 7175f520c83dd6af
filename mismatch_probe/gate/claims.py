"""Claims that a check tests, the metrics that a limit can bound, and the error budget over declared looks.

At information fraction t the budget spent is alpha ln(1 + (e - 1) t), Lan and DeMets' Pocock-type function [Lan and
DeMets 1983, Biometrika 70:659]. Each look's nominal level follows from the joint normal law of the statistics at all
looks so far, integrated look by look [Armitage, McPherson and Rowe 1969, JRSS A 132:235].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from scipy import optimize, special

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.difference.versus import TracedEstimate, ratio_at, traced_metrics
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.records.findings import Explanation, Localization
from mismatch_probe.records.manifest import LogOrigin
from mismatch_probe.stats.catalogue import MetricFacts, facts_of
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair

SMALLEST_P = 1e-9
_STEPS = 50

Bounds = tuple[float | None, float | None]
Passing = Callable[[float, bool, float], float | None]
"""The bound that decides a pass, from alpha, whether the limit is an upper one, and the factor of the sample's size."""


@dataclass(frozen=True)
class Claim:
    """A value and its one-sided bounds."""

    value: float
    bounds: Callable[[float], Bounds]
    """`bounds(alpha)` is (lower, upper), each wrong with probability alpha."""
    passing: Passing
    """The bound that decides a pass; it also covers what is too rare for the sample to show."""

    def p_beyond(self, limit: float, *, upper: bool) -> float:
        """The smallest alpha at which the data put the value beyond the limit (above an upper one); 1 where it is not.

        Found by halving, because the bounds of shares and quantiles have no formula to invert.
        """
        if not (self.value > limit if upper else self.value < limit):
            return 1.0
        low, high = math.log(SMALLEST_P), math.log(0.5)
        if self._puts_beyond(math.exp(low), limit, upper):
            return SMALLEST_P
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._puts_beyond(math.exp(middle), limit, upper) else (middle, high)
        return math.exp(high)

    def within(self, limit: float, alpha: float, *, upper: bool, times: float = 1.0) -> bool:
        """Whether the data put the value on the right side of the limit, or would with `times` as large a sample."""
        return _is_within(self.passing(alpha, upper, times), limit, upper)

    def is_held_back_by_tail(self, limit: float, alpha: float, *, upper: bool) -> bool:
        """Whether the interval keeps the limit, and only what is too rare for the sample may break it."""
        low, high = self.bounds(alpha)
        return _is_within(high if upper else low, limit, upper) and not self.within(limit, alpha, upper=upper)

    def _puts_beyond(self, alpha: float, limit: float, upper: bool) -> bool:
        low, high = self.bounds(alpha)
        return (low is not None and low > limit) if upper else (high is not None and high < limit)


def absolute(estimate: Estimate) -> Claim:
    """The metric itself; no bounds where the estimate has none."""

    def bounds(alpha: float) -> Bounds:
        both_sided = estimate.at(1 - 2 * alpha) if isinstance(estimate, TracedEstimate) else None
        return (None, None) if both_sided is None else (both_sided.low, both_sided.high)

    def passing(alpha: float, upper: bool, times: float) -> float | None:
        both_sided = estimate.at(1 - 2 * alpha, times) if isinstance(estimate, TracedEstimate) else None
        if both_sided is None or both_sided.low is None or both_sided.high is None:
            return None
        bound = both_sided.high if upper else both_sided.low
        tail_bound = both_sided.tail_bound
        return bound if tail_bound is None else (max if upper else min)(bound, tail_bound)

    return Claim(estimate.value, bounds, passing)


def regression(baseline: Estimate, run: Estimate, *, higher_is_better: bool) -> Claim | None:
    """How much worse the run is, as a share of the baseline's value; None where either value is 0.

    The ratio of the two is bounded on the log scale: a margin of 0.1 stands for a ratio of 1.1, or 0.9 where higher
    is better (a non-inferiority test with a ratio margin [Rothmann, Wiens and Chan 2012, Design and Analysis of
    Non-Inferiority Trials, chapter 11]).
    """
    ratio = ratio_at(baseline, run)
    worse_by = None if ratio is None else ratio(0.9)
    if ratio is None or worse_by is None:
        return None

    def bounds(alpha: float) -> Bounds:
        bound = ratio(1 - 2 * alpha)
        if bound is None or bound.low is None or bound.high is None:
            return None, None
        return _worsening(bound.low, bound.high, higher_is_better)

    def passing(alpha: float, upper: bool, times: float) -> float | None:
        return bounds(alpha)[1 if upper else 0]

    return Claim(_worsening(worse_by.value, worse_by.value, higher_is_better)[0], bounds, passing)


def _is_within(bound: float | None, limit: float, upper: bool) -> bool:
    return bound is not None and (bound <= limit if upper else bound >= limit)


def _worsening(low: float, high: float, higher_is_better: bool) -> tuple[float, float]:
    return (1 - high, 1 - low) if higher_is_better else (low - 1, high - 1)


LEAST_STEP = 1.5
"""Each look needs this many times the sequences of the look before."""

_NODES = 128
_TAIL = 9.0
_HIGHEST = 12.0


def declared_looks(min_sequences: int, max_sequences: int) -> list[int]:
    """The numbers of sequences at which the gate may look: they double, and the last step is at least LEAST_STEP.

    >>> declared_looks(256, 1100)
    [256, 512, 1100]
    """
    looks = [min_sequences]
    while looks[-1] * 2 * LEAST_STEP <= max_sequences:
        looks.append(looks[-1] * 2)
    return looks if looks[-1] == max_sequences else [*looks, max_sequences]


def look_number(looks: Sequence[int], num_sequences: int) -> int:
    """The number of declared looks that a sample of this size has reached; 0 where it is too small for the first."""
    return sum(num_sequences >= look for look in looks)


def fractions_so_far(looks: Sequence[int], num_sequences: int) -> tuple[float, ...]:
    """The information fractions of the looks up to the current one, which counts with its real size.

    Earlier looks count as made, whether the sample was taken at once or grew: a sample is at one look only, however
    often it is gated.
    """
    earlier_looks = looks[: max(look_number(looks, num_sequences) - 1, 0)]
    return (*(look / looks[-1] for look in earlier_looks), min(num_sequences / looks[-1], 1.0))


def spent_alpha(alpha: float, fraction: float) -> float:
    """The error budget that is spent up to an information fraction."""
    return alpha * math.log(1 + (math.e - 1) * fraction)


@cache
def nominal_level(alpha: float, fractions: tuple[float, ...]) -> float:
    """The one-sided level at which the last look tests, so that all looks together err at most as often as is spent.

    Raises:
        ValueError: the fractions do not rise within (0, 1].
    """
    if not all(low < high for low, high in zip((0.0, *fractions), fractions, strict=False)) or fractions[-1] > 1:
        raise ValueError(f"information fractions {fractions} do not rise within (0, 1]")
    points, weights = np.zeros(1), np.ones(1)
    last_fraction = spent_so_far = 0.0
    for fraction in fractions:
        budget = spent_alpha(alpha, fraction) - spent_so_far
        step = math.sqrt(fraction - last_fraction)
        bound = _boundary(points, weights, step, budget, fraction)
        points, weights = _law_after_look(points, weights, step, bound, fraction)
        last_fraction, spent_so_far = fraction, spent_so_far + budget
    return float(special.ndtr(-bound / math.sqrt(fractions[-1])))


def _boundary(points: Floats, weights: Floats, step: float, budget: float, fraction: float) -> float:
    """The boundary that the score process first crosses at this look, with probability `budget`."""

    def excess(bound: float) -> float:
        return float(weights @ special.ndtr((points - bound) / step)) - budget

    return float(optimize.brentq(excess, 0.0, _HIGHEST * math.sqrt(fraction), xtol=1e-12))


@cache
def _nodes_and_weights() -> tuple[Floats, Floats]:
    """The Gauss-Legendre nodes and weights on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


def _law_after_look(
    points: Floats, weights: Floats, step: float, bound: float, fraction: float
) -> tuple[Floats, Floats]:
    """The law of the score process among paths that have not crossed a boundary, as weighted Gauss-Legendre points."""
    low = -_TAIL * math.sqrt(fraction)
    nodes, node_weights = _nodes_and_weights()
    new_points = low + (nodes + 1) / 2 * (bound - low)
    kernel = np.exp(-(((new_points[:, None] - points) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
    return new_points, kernel @ weights * node_weights * (bound - low) / 2


AGGREGATES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min", "std")


@cache
def _example_metrics() -> dict[str, Estimate]:
    lengths = np.full(32, 2)
    ids, nats = np.arange(64), np.linspace(0, 3, 64)
    pair = TokenPair(
        Sequences.of_lengths(lengths), log_pi=-nats, log_mu=-2 * nats, top1_pi=ids, top1_mu=ids, entropy_pi=1 + nats
    )
    return traced_metrics(pair)[0]


def known_metrics() -> frozenset[str]:
    """The names of all metrics."""
    return frozenset(_example_metrics())


def _facts_of(name: str) -> MetricFacts:
    facts = facts_of(name)
    assert facts is not None, name
    return facts


def full_name(metric: str, aggregate: str) -> str:
    """`abs_logprob_diff` and `p99` -> `abs_logprob_diff_p99`; a mean has the metric's own name."""
    return metric if aggregate == "mean" else f"{metric}_{aggregate}"


def why_never_blocking(name: str, clip: float | None) -> str | None:
    """Why a metric cannot decide a gate, and what to use instead; None where it can.

    An extreme has no interval, and an exponential of unbounded log-ratios depends on one token or response.
    """
    facts = _facts_of(name)
    if facts.needs_clip and clip is None:
        return "without clip its heavy tail hangs on single tokens; add clip = 5, or use abs_logprob_diff"
    return facts.never_blocks or None


def range_of(name: str, clip: float | None) -> tuple[float, float]:
    """The smallest and the largest value that a metric can have; with a clip, d is within +-`clip`."""
    facts = _facts_of(name)
    most = facts.most if clip is None or facts.under_clip is None else facts.under_clip(clip)
    return facts.least, most


def has_regression(name: str) -> bool:
    """Whether a metric is positive by nature and best at an end of its range, so that it can be 10 % worse."""
    return _facts_of(name).can_regress


def is_better_higher(name: str) -> bool:
    return _facts_of(name).higher_is_better


_FITS = (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)
_UNMEASURED = HeadroomCode.GRADIENTS_NOT_MEASURED
_WEIGHTS_ONLY = "it was made with --weights-only"
_NUM_LOSS_SCALES = 25


class ImportedLog(NamedTuple):
    """What is filed of a log: what its import read, and each explanation."""

    origin: LogOrigin
    explanations: Sequence[Explanation]


@dataclass(frozen=True)
class FiledMetric:
    """A metric of a document that is filed with a run; its value is between `least` and `most`."""

    read: Callable[[Any], float | str]
    """Reads the value, or the reason why the document has none."""
    least: float
    most: float


def _read_fits(headroom: Headroom) -> float | str:
    if headroom.activations is None and headroom.verdict.code in _FITS:
        return _WEIGHTS_ONLY
    return headroom.verdict.sentence if headroom.verdict.code == _UNMEASURED else float(headroom.verdict.code in _FITS)


def _read_margin_bits(headroom: Headroom) -> float | str:
    if headroom.activations is None:
        return _WEIGHTS_ONLY
    largest = [headroom.weights.total.largest, *(result.largest or 0.0 for result in headroom.activations.tightest)]
    return math.log2(Dtype.FP16.largest / max(largest)) if max(largest) > 0 else "every weight and result is 0"


def _read_loss_scales(headroom: Headroom) -> float | str:
    if headroom.plain is None:
        return _WEIGHTS_ONLY
    if not headroom.measured_loss_scales:
        return "gradients were not measured, since its responses leave next to none"
    low, high = headroom.plain.from_exponent, headroom.plain.to_exponent
    return 0.0 if low is None or high is None else float(high - low + 1)


def _read_suspects(localization: Localization) -> float | str:
    return float(len(localization.suspects))


def _read_largest_share(localization: Localization) -> float | str:
    if not localization.settings.interventions:
        return "it was made with --no-interventions"
    interventions = [] if localization.interventions is None else localization.interventions.ranked
    return max((intervention.removed.value for intervention in interventions), default=0.0)


HEADROOM = {
    "headroom_fits": FiledMetric(_read_fits, 0.0, 1.0),
    "headroom_margin_bits": FiledMetric(_read_margin_bits, -math.inf, math.inf),
    "headroom_loss_scales": FiledMetric(_read_loss_scales, 0.0, _NUM_LOSS_SCALES),
}
LOCALIZE = {
    "localize_suspects": FiledMetric(_read_suspects, 0.0, math.inf),
    "localize_largest_share": FiledMetric(_read_largest_share, -math.inf, 1.0),
}


def _read_turns(log: ImportedLog) -> float | str:
    turns = log.origin.turns
    return "no trajectory of the log has several turns" if turns is None else turns.broken_share


def _read_expert_coverage(log: ImportedLog) -> float | str:
    experts = log.origin.experts
    return "the log records no experts" if experts is None else experts.coverage


def _read_expert_agreement(log: ImportedLog) -> float | str:
    agreements = [each.experts.agreement for each in log.explanations if each.experts is not None]
    why_not = "no explanation of the log compares its experts (explain RUN --model CHECKPOINT)"
    return min(agreements) if agreements else why_not


def _read_kept_coverage(log: ImportedLog) -> float | str:
    sets = log.origin.kept_sets
    return "the log records no sets that tokens were drawn from" if sets is None else sets.coverage


def _read_kept_agreement(log: ImportedLog) -> float | str:
    sets = log.origin.kept_sets
    return "the log records no sets that tokens were drawn from" if sets is None else sets.agreement


def _read_mixed_versions(log: ImportedLog) -> float | str:
    shares = [each.parts.mixed_share for each in log.explanations if each.parts is not None]
    shares += [] if log.origin.versions is None else [log.origin.versions.mixed_share]
    return max(shares) if shares else "the log names no versions of weights, and no explanation of it compares several"


def _read_version_misfit(log: ImportedLog) -> float | str:
    shares = [
        each.parts.misfit_share for each in log.explanations if each.parts is not None and each.parts.num_recorded
    ]
    return max(shares) if shares else "no explanation of the log compares its versions (explain RUN --weights V=FOLDER)"


LOG = {
    "log_broken_turns": FiledMetric(_read_turns, 0.0, 1.0),
    "log_expert_coverage": FiledMetric(_read_expert_coverage, 0.0, 1.0),
    "log_expert_agreement": FiledMetric(_read_expert_agreement, 0.0, 1.0),
    "log_kept_coverage": FiledMetric(_read_kept_coverage, 0.0, 1.0),
    "log_kept_agreement": FiledMetric(_read_kept_agreement, 0.0, 1.0),
    "log_mixed_versions": FiledMetric(_read_mixed_versions, 0.0, 1.0),
    "log_version_misfit": FiledMetric(_read_version_misfit, 0.0, 1.0),
}
"""Of an imported log."""
FILED_METRICS = {**HEADROOM, **LOCALIZE, **LOG}


class LayoutMetric(NamedTuple):
    """How far a quantity of the first step of a training may differ from that of another layout."""

    quantity: str
    words: str
    is_relative: bool
    """The difference is a share of the baseline's value."""


LAYOUT_METRICS: Final = {
    "layout_loss": LayoutMetric("loss", "the loss", is_relative=True),
    "layout_gradient_norm": LayoutMetric("gradient_norm", "the gradient norm", is_relative=True),
    "layout_entropy": LayoutMetric("entropy", "the entropy", is_relative=False),
    "layout_kl_k3": LayoutMetric("kl_k3", "KL (k3)", is_relative=False),
}
