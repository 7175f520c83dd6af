"""Which metrics a limit can be put on: their names, which way is better, and which are shown but never decide."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mismatch_probe.difference.versus import Traced, traced_metrics
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.findings import Localization
from mismatch_probe.records.headroom import Headroom, HeadroomCode
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair

AGGREGATES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min", "std")

HIGHER_IS_BETTER = frozenset({"ess_token", "ess_seq", "prob_pearson", "bitwise_equal"})

_HEAVY_UNLESS_CLIPPED = frozenset({"kl_k3", "kl_entropy_ratio", "token_mult_prob_error"})
_HEAVY_SEQUENCES = frozenset({"kl_k3_seq", "chi2_seq", "is_ratio_mean_seq", "ess_seq"})
_SQUARED_WEIGHTS = frozenset({"ess_token", "chi2_token"})
_SHARES = ("prob_abs_diff", "outside_band", "differs", "top1_flip")
_MOST_OF_CLIP: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("abs_logprob_diff", "logprob_diff_rms", "kl_k1"), lambda clip: clip),
    "kl_k2": lambda clip: clip**2 / 2,
    "kl_k3": lambda clip: math.expm1(clip) - clip,
}
_IDEAL_IS_ONE = ("is_ratio_mean_token", "is_ratio_mean_seq", "ppl_ratio")


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


def full_name(metric: str, aggregate: str) -> str:
    """`abs_logprob_diff` and `p99` -> `abs_logprob_diff_p99`; a mean goes by the metric's own name."""
    return metric if aggregate == "mean" else f"{metric}_{aggregate}"


def why_never_blocking(name: str, clip: float | None) -> str | None:
    """Why a metric cannot decide, and what to use instead; None where it can.

    An extreme has no interval, and an exponential of unbounded log-ratios has one token or response deciding it.
    """
    for ending in ("_max", "_min"):
        if name.endswith(ending):
            base = name.removesuffix(ending)
            instead = "prob_abs_diff" if base == "prob_diff_extremes" else base
            use = f"{instead} or {instead}_p99" if f"{instead}_p99" in known_metrics() else instead
            return f"an extreme has no interval and grows with the size of the sample; use {use}"
    if name in _HEAVY_SEQUENCES:
        return "the exponential of a whole response's log-ratio hangs on single responses; use kl_k2_seq"
    if name in _SQUARED_WEIGHTS:
        return "squared weights hang on the few largest, which a sample may lack; use kl_k3 with clip = 5, or kl_k2"
    if name in _HEAVY_UNLESS_CLIPPED and clip is None:
        return "without clip its heavy tail hangs on single tokens; add clip = 5, or use abs_logprob_diff"
    return None


def range_of(name: str, clip: float | None) -> tuple[float, float]:
    """The least and the most that a metric can be, whatever the data; d lies within +-`clip` where it is given."""
    if name == "prob_pearson":
        return -1.0, 1.0
    if name in HIGHER_IS_BETTER or name.startswith(_SHARES):
        return 0.0, 1.0
    if name.startswith("token_mult_prob_error"):
        return 1.0, math.inf if clip is None else math.exp(clip)
    least = 0.0 if _is_positive(name) else -math.inf
    most = math.inf if clip is None or name not in _MOST_OF_CLIP else _MOST_OF_CLIP[name](clip)
    return least, most


def has_regression(name: str) -> bool:
    """Whether a metric is positive by nature and best at an end, so that it can be so many per cent worse."""
    return _is_positive(name) and name not in _IDEAL_IS_ONE


def _is_positive(name: str) -> bool:
    example = _example()[name]
    return isinstance(example, Traced) and example.positive


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
