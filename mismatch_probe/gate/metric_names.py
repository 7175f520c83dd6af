"""Which metrics a limit can be put on: their names, which way is better, and which are shown but never decide."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from mismatch_probe.difference.traced import Traced, traced_metrics
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
