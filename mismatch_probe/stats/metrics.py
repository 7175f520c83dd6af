"""Every metric of one pair under its canonical name.

NAME is a mean over response tokens; NAME_seq the same quantity for whole sequences, whose log-ratio is S = sum of d.
Other aggregates are NAME_p50, NAME_p90, NAME_p99, NAME_p99_9, NAME_max, NAME_min and NAME_std. Where neither level is
the plain one both are named (`ess_token`, `ess_seq`). Bands are spelled `outside_band_LOW_HIGH`: `outside_band_0.5_2`.
"""

import math
from collections.abc import Collection
from dataclasses import replace

from mismatch_probe.stats.estimator import Estimator, Metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.stats.token_metrics import divergence, importance_weights, logprob_deviation, probability_deviation

NONE_WHOLE = "no response has the log-probs of all its tokens"
TOO_LARGE = "a log-ratio is so large that its exponential is beyond the largest float64"
DIFFERS_NATS = 1e-6


def pair_metrics(
    pair: TokenPair, level: float = 0.95, names: Collection[str] | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """The metrics of a pair, and for each one that cannot be had the reason.

    Every estimate is clustered by prompt; extremes carry no interval. What averages over sequences is of the responses
    that are whole. Only metrics of `names` are computed, or all.
    """
    return metrics_of(pair, Estimator(pair.sequences, level), names)


def metrics_of(
    pair: TokenPair, estimator: Estimator, names: Collection[str] | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """As `pair_metrics`, with the estimates that `estimator` makes."""
    estimates: dict[str, Estimate] = {}
    unavailable: dict[str, str] = {}
    whole = pair.of_whole_responses
    for family in (logprob_deviation, probability_deviation, divergence, importance_weights, agreement):
        of_whole: Metrics = {}
        if whole is not None and whole is not pair:
            of_whole = family(whole, replace(estimator, sequences=whole.sequences))
        for name, compute in family(pair, estimator).items():
            if names is not None and name not in names:
                continue
            metric = compute()
            if whole is not pair and isinstance(metric, Estimate) and metric.by == "sequence":
                metric = of_whole[name]() if of_whole else NONE_WHOLE
            if isinstance(metric, Estimate) and _is_finite(metric):
                estimates[name] = metric
            else:
                unavailable[name] = metric if isinstance(metric, str) else TOO_LARGE
    return estimates, unavailable


def _is_finite(estimate: Estimate) -> bool:
    return all(bound is None or math.isfinite(bound) for bound in (estimate.value, estimate.low, estimate.high))


def agreement(pair: TokenPair, estimator: Estimator) -> Metrics:
    """Shares of tokens whose log-probs differ by more than 1e-6 nats, or not at all, and of arg-max tokens that differ.

    torchtitan's batch-invariant mode asks for `bitwise_equal` of exactly 1.
    """

    def top1_flip() -> Estimate | str:
        if pair.top1_pi is None or pair.top1_mu is None:
            return "the arg-max tokens of both sides were not recorded"
        return estimator.share(pair.top1_pi != pair.top1_mu, "token")

    return {
        "differs": lambda: estimator.share(pair.abs_diff > DIFFERS_NATS, "token"),
        "bitwise_equal": lambda: estimator.share(pair.diff == 0, "token"),
        "top1_flip": top1_flip,
    }
