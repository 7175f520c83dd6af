"""Which metrics a limit can be put on: their names, which way is better, and which are shown but never decide."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mismatch_probe.difference.versus import traced_metrics
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.findings import Localization
from mismatch_probe.records.headroom import Headroom, HeadroomCode
from mismatch_probe.stats.catalogue import MetricFacts, facts_of
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair

AGGREGATES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min", "std")


@cache
def _example() -> dict[str, Estimate]:
    ids, nats = np.arange(4), np.arange(4.0)
    pair = TokenPair(
        Sequences.of_lengths([2, 2]), log_pi=-nats, log_mu=-2 * nats, top1_pi=ids, top1_mu=ids, entropy_pi=1 + nats
    )
    return traced_metrics(pair)[0]


def known_metrics() -> frozenset[str]:
    """Every metric there is."""
    return frozenset(_example())


def _facts(name: str) -> MetricFacts:
    facts = facts_of(name)
    assert facts is not None, name
    return facts


def full_name(metric: str, aggregate: str) -> str:
    """`abs_logprob_diff` and `p99` -> `abs_logprob_diff_p99`; a mean goes by the metric's own name."""
    return metric if aggregate == "mean" else f"{metric}_{aggregate}"


def why_never_blocking(name: str, clip: float | None) -> str | None:
    """Why a metric cannot decide, and what to use instead; None where it can.

    An extreme has no interval, and an exponential of unbounded log-ratios has one token or response deciding it.
    """
    facts = _facts(name)
    if facts.needs_clip and clip is None:
        return "without clip its heavy tail hangs on single tokens; add clip = 5, or use abs_logprob_diff"
    return facts.never_blocks or None


def range_of(name: str, clip: float | None) -> tuple[float, float]:
    """The least and the most that a metric can be, whatever the data; d lies within +-`clip` where it is given."""
    facts = _facts(name)
    most = facts.most if clip is None or facts.under_clip is None else facts.under_clip(clip)
    return facts.least, most


def has_regression(name: str) -> bool:
    """Whether a metric is positive by nature and best at an end, so that it can be so many per cent worse."""
    return _facts(name).can_regress


def is_better_higher(name: str) -> bool:
    return _facts(name).higher_is_better


_FITS = (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)
_WEIGHTS_ONLY = "it was made with --weights-only"
_NUM_LOSS_SCALES = 25


@dataclass(frozen=True)
class FiledMetric:
    """`read` gives the value, or why the document has none; it lies between `least` and `most`."""

    read: Callable[[Any], float | str]
    least: float
    most: float


def _fits(headroom: Headroom) -> float | str:
    if headroom.activations is None and headroom.verdict.code in _FITS:
        return _WEIGHTS_ONLY
    return float(headroom.verdict.code in _FITS)


def _margin_bits(headroom: Headroom) -> float | str:
    if headroom.activations is None:
        return _WEIGHTS_ONLY
    largest = [headroom.weights.total.largest, *(result.largest or 0.0 for result in headroom.activations.tightest)]
    return math.log2(Dtype.FP16.largest / max(largest)) if max(largest) > 0 else "every weight and result is 0"


def _loss_scales(headroom: Headroom) -> float | str:
    if headroom.plain is None:
        return _WEIGHTS_ONLY
    low, high = headroom.plain.from_exponent, headroom.plain.to_exponent
    return 0.0 if low is None or high is None else float(high - low + 1)


def _suspects(localization: Localization) -> float | str:
    return float(len(localization.suspects))


def _largest_share(localization: Localization) -> float | str:
    if not localization.settings.interventions:
        return "it was made with --no-interventions"
    ranked = [] if localization.interventions is None else localization.interventions.ranked
    return max((intervention.removed.value for intervention in ranked), default=0.0)


HEADROOM = {
    "headroom_fits": FiledMetric(_fits, 0.0, 1.0),
    "headroom_margin_bits": FiledMetric(_margin_bits, -math.inf, math.inf),
    "headroom_loss_scales": FiledMetric(_loss_scales, 0.0, _NUM_LOSS_SCALES),
}
LOCALIZE = {
    "localize_suspects": FiledMetric(_suspects, 0.0, math.inf),
    "localize_largest_share": FiledMetric(_largest_share, -math.inf, 1.0),
}
FILED_METRICS = {**HEADROOM, **LOCALIZE}
