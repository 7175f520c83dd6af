"""Estimates of KL(mu || pi) and chi-squared from tokens sampled from mu (these are not KL(pi || mu)).

Sources: k1, k2, k3 from Schulman 2020, "Approximating KL divergence" (tinker's v1 and v2, verl's `k3_kl`, NeMo-RL's
`gen_kl_error`, prime-rl's `mismatch_kl`); chi-squared as in verl's rollout correction. Of these only chi-squared is
bounded.
"""

from functools import cache, partial

import numpy as np

from mismatch_probe.stats.effective_share import LOG_BOUND
from mismatch_probe.stats.estimator import Estimator, Metrics
from mismatch_probe.stats.intervals import Scale, ratio
from mismatch_probe.stats.results import Estimate, Unit
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.stats.tails import ErrorTail, Terms, error_tail
from mismatch_probe.stats.weights import bounded, tail_of


def divergence(pair: TokenPair, estimator: Estimator) -> Metrics:
    """k1, k2, k3 and chi-squared of tokens and of whole sequences; k3 over the policy's mean entropy (prime-rl)."""

    @cache
    def tail() -> ErrorTail | None:
        return tail_of(pair, estimator)

    def mean_of(terms: Terms) -> Estimate | None:
        return estimator.with_rest(estimator.mean(terms(pair.diff), "token", Scale.POSITIVE), tail(), terms)

    def k2_seq() -> Estimate | None:
        sums = np.abs(pair.diff_sums)
        tail = error_tail(sums, partial(estimator.totals, by="sequence"), max(LOG_BOUND, float(sums.max())))
        return estimator.with_rest(estimator.mean(k2_terms(sums), "sequence", Scale.POSITIVE), tail, k2_terms)

    def chi2_token() -> Estimate | None:
        return estimator.with_rest(_chi_squared(pair.diff, estimator, "token"), tail(), squared_weight_less_one)

    return {
        "kl_k1": lambda: estimator.mean(-pair.diff, "token"),
        "kl_k2": lambda: mean_of(k2_terms),
        "kl_k3": lambda: mean_of(k3_terms),
        "kl_k1_seq": lambda: estimator.mean(-pair.diff_sums, "sequence"),
        "kl_k2_seq": k2_seq,
        "kl_k3_seq": lambda: estimator.mean(k3_terms(pair.diff_sums), "sequence", Scale.POSITIVE),
        "chi2_token": chi2_token,
        "chi2_seq": lambda: _chi_squared(pair.diff_sums, estimator, "sequence"),
        "kl_entropy_ratio": lambda: _kl_over_entropy(pair, estimator, tail()),
    }


def k2_terms(log_ratios: Floats) -> Floats:
    return log_ratios**2 / 2


def squared_weight_less_one(log_ratios: Floats) -> Floats:
    return np.asarray(np.expm1(2 * bounded(log_ratios)))


def k3_terms(log_ratios: Floats) -> Floats:
    """e^d - 1 - d without the loss of digits at small d; infinite where e^d overflows."""
    with np.errstate(over="ignore"):
        return np.asarray(np.expm1(log_ratios) - log_ratios)


def _chi_squared(log_ratios: Floats, estimator: Estimator, by: Unit) -> Estimate | None:
    """mean e^(2 d) - 1."""
    return estimator.mean(squared_weight_less_one(log_ratios), by)


def _kl_over_entropy(pair: TokenPair, estimator: Estimator, tail: ErrorTail | None) -> Estimate | str | None:
    if pair.entropy_pi is None:
        return "the policy's entropy was not recorded"
    entropy = estimator.totals(pair.entropy_pi, "token")
    if not entropy.sum() > 0:
        return "the policy's entropy is 0"
    totals = [estimator.totals(k3_terms(pair.diff), "token"), entropy]
    mean_entropy = float(entropy.sum()) / pair.sequences.num_tokens
    over_entropy = estimator.smooth(ratio, totals, "token", Scale.POSITIVE)
    return estimator.with_rest(over_entropy, tail, lambda errors: k3_terms(errors) / mean_entropy)
