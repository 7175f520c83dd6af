"""Every metric of one pair under its canonical name, and the metrics of tokens.

Means and corrections limit log-ratios to +-20, so that every sum exists; no usable correction lets so much through. An
effective share needs no limit: it depends on the weights' shares alone.

Sources: k1, k2, k3 from Schulman 2020, "Approximating KL divergence" (tinker's v1 and v2, verl's `k3_kl`, NeMo-RL's
`gen_kl_error`, prime-rl's `mismatch_kl`); chi-squared as in verl's rollout correction. Of these only chi-squared is
bounded.

NAME is a mean over response tokens; NAME_seq the same quantity for whole sequences, whose log-ratio is S = sum of d.
Other aggregates are NAME_p50, NAME_p90, NAME_p99, NAME_p99_9, NAME_max, NAME_min and NAME_std. Where neither level is
the usual one both have a suffix (`ess_token`, `ess_seq`). A band is `outside_band_LOW_HIGH`: `outside_band_0.5_2`.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial

import numpy as np

from mismatch_probe.stats.estimator import Estimator, LazyMetrics
from mismatch_probe.stats.intervals import Scale, ratio
from mismatch_probe.stats.results import LEVEL, Estimate, Unit
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.stats.tails import LOG_BOUND, RARE_UP_TO, ErrorTail, TermFunction, error_tail, pareto_k, scale_tail

BANDS = ((0.8, 1.25), (0.9, 1.1), (0.5, 2.0), (0.5, 5.0))


_TAIL = "_error_tail"


def clip_log_ratios(log_ratios: Floats) -> Floats:
    return np.clip(log_ratios, -LOG_BOUND, LOG_BOUND)


def weight_excess(log_ratios: Floats) -> Floats:
    """w - 1 for w = e^d, exact for tiny d; d is limited to +-20."""
    return np.asarray(np.expm1(clip_log_ratios(log_ratios)))


def tail_of(pair: TokenPair, estimator: Estimator) -> ErrorTail | None:
    """The tail of abs(d) up to the clip, else up to 5 nats or the largest abs(d), at most 20; None where all are 0.

    It is computed once for a pair, which keeps it beside its cached properties.
    """
    cached_values = vars(pair)
    if _TAIL not in cached_values:
        cached_values[_TAIL] = _fitted_tail(pair, estimator)
    tail: ErrorTail | None = cached_values[_TAIL]
    return tail


def _fitted_tail(pair: TokenPair, estimator: Estimator) -> ErrorTail | None:
    most = min(max(RARE_UP_TO, float(pair.abs_diff.max())), LOG_BOUND) if pair.clip is None else pair.clip
    tail = error_tail(pair.abs_diff, partial(estimator.totals, by="token"), most)
    if tail is None:
        return None
    sequences = pair.sequences
    prompt = sequences.spread(sequences.cluster_index)
    return replace(tail, scales=scale_tail(pair.abs_diff, prompt, sequences.num_clusters))


def importance_weights(pair: TokenPair, estimator: Estimator) -> LazyMetrics:
    """Mean weight, perplexity ratio, effective sample share, and shares of rho outside bands.

    `is_ratio_mean_*` is 1 in expectation when both policies normalise over the same support. `ess_*` is Kish's
    effective sample size over n [Kish 1965; Liu 2001, Monte Carlo Strategies in Scientific Computing, section 2.5.3].
    The few largest e^S decide `ess_seq`, and a sample may lack them: its interval also contains that of log-normal
    weights, whose lower bound is far lower.
    `pareto_k_*` says whether those means can be believed (`stats.tails.pareto_k`).
    `log_ppl_diff` and `ppl_ratio` are verl's: per sequence mean log mu - mean log pi, and the mean of its exponential.
    """

    def log_ppl_diff() -> Floats:
        return -pair.diff_sums / pair.sequences.lengths

    def k_hat(log_ratios: Floats, by: Unit) -> Estimate | str:
        shape = pareto_k(clip_log_ratios(log_ratios))
        return NO_TAIL if shape is None else estimator.bare(shape, by)

    def outside(low: float, high: float) -> Estimate:
        return estimator.share((pair.diff < np.log(low)) | (pair.diff > np.log(high)), "token")

    return {
        "is_ratio_mean_token": lambda: estimator.mean(1 + weight_excess(pair.diff), "token"),
        "is_ratio_mean_seq": lambda: estimator.mean(1 + weight_excess(pair.diff_sums), "sequence", Scale.POSITIVE),
        "ess_token": lambda: estimator.effective_share(pair.diff, "token", tail_of(pair, estimator)),
        "ess_seq": lambda: estimator.effective_share(pair.diff_sums, "sequence"),
        "pareto_k_token": lambda: k_hat(pair.diff, "token"),
        "pareto_k_seq": lambda: k_hat(pair.diff_sums, "sequence"),
        "log_ppl_diff": lambda: estimator.mean(log_ppl_diff(), "sequence"),
        "ppl_ratio": lambda: estimator.mean(1 + weight_excess(log_ppl_diff()), "sequence"),
        **{f"outside_band_{low:g}_{high:g}": partial(outside, low, high) for low, high in BANDS},
    }


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


def logprob_deviation(pair: TokenPair, estimator: Estimator) -> LazyMetrics:
    """abs(d) and d in nats.

    `abs_logprob_diff` is TRL's `sampling/sampling_logp_difference`; `abs_logprob_diff_seq`, the mean of per-sequence
    means, is slime's `train_rollout_logprob_abs_diff`. `token_mult_prob_error` = mean e^abs(d) is NeMo-RL's, and its
    `_max` the largest mean of one sequence.
    """

    @cache
    def sorted_values() -> Floats:
        return np.sort(pair.abs_diff)

    @cache
    def multiplicative() -> Floats:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(pair.abs_diff))

    @cache
    def tail() -> ErrorTail | None:
        return tail_of(pair, estimator)

    def multiplicative_error() -> Estimate | None:
        with np.errstate(over="ignore"):
            excess = estimator.mean(np.expm1(pair.abs_diff), "token", Scale.POSITIVE)
        more_than_1 = estimator.with_rest(excess, tail(), np.expm1)
        return None if more_than_1 is None else estimator.map_estimate(more_than_1, lambda excess: 1 + excess)

    def mean_of_each(values: Floats) -> Floats:
        return pair.sequences.sum_by_sequence(values) / pair.sequences.lengths

    def quantile(probability: float) -> Estimate:
        return estimator.quantile(sorted_values(), pair.abs_diff, probability, "token")

    return {
        "abs_logprob_diff": lambda: estimator.with_rest(
            estimator.mean(pair.abs_diff, "token", Scale.POSITIVE), tail(), np.abs
        ),
        "abs_logprob_diff_seq": lambda: estimator.mean(mean_of_each(pair.abs_diff), "sequence", Scale.POSITIVE),
        "abs_logprob_diff_max": lambda: estimator.bare(pair.abs_diff.max(), "token"),
        "logprob_diff_rms": lambda: estimator.root_mean_square(pair.diff, "token", tail()),
        "token_mult_prob_error": multiplicative_error,
        "token_mult_prob_error_max": lambda: estimator.bare(mean_of_each(multiplicative()).max(), "sequence"),
        **{f"abs_logprob_diff_{suffix}": partial(quantile, probability) for suffix, probability in QUANTILES.items()},
    }


def probability_deviation(pair: TokenPair, estimator: Estimator) -> LazyMetrics:
    """e^log_pi - e^log_mu.

    verl: `training/rollout_probs_diff_mean`, `_std`, `_max` and its Pearson correlation. The signed extremes going to
    +1 and -1 at equal weights announced collapse in arXiv 2510.26788.
    """

    @cache
    def signed_diffs() -> Floats:
        return pair.prob_diff

    @cache
    def absolute() -> Floats:
        return np.abs(signed_diffs())

    def pearson() -> Estimate | str:
        correlation = estimator.correlation(pair.prob_pi, pair.prob_mu, "token")
        return correlation or "the token probabilities of one side do not vary"

    return {
        "prob_abs_diff": lambda: estimator.mean(absolute(), "token", Scale.POSITIVE),
        "prob_abs_diff_std": lambda: estimator.standard_deviation(absolute(), "token"),
        "prob_abs_diff_max": lambda: estimator.bare(absolute().max(), "token"),
        "prob_diff_extremes_max": lambda: estimator.bare(signed_diffs().max(), "token"),
        "prob_diff_extremes_min": lambda: estimator.bare(signed_diffs().min(), "token"),
        "prob_pearson": pearson,
    }


def divergence(pair: TokenPair, estimator: Estimator) -> LazyMetrics:
    """k1, k2, k3 and chi-squared of tokens and of whole sequences; k3 over the policy's mean entropy (prime-rl)."""

    @cache
    def tail() -> ErrorTail | None:
        return tail_of(pair, estimator)

    def mean_of(terms: TermFunction) -> Estimate | None:
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
    return np.asarray(np.expm1(2 * clip_log_ratios(log_ratios)))


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


NO_TAIL = "the largest importance weights are equal, or fewer than five: they show no tail"
NONE_WHOLE = "no response has the log-probs of all its tokens"
TOO_LARGE = "a log-ratio is so large that its exponential is beyond the largest float64"
DIFFERS_NATS = 1e-6


def pair_metrics(
    pair: TokenPair, level: float = LEVEL, names: Collection[str] | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """The metrics of a pair, and the reason for each one that is unavailable.

    Every estimate is clustered by prompt; extremes have no interval. Metrics of sequences are of the complete responses
    alone. Only the metrics in `names` are computed, or all.
    """
    return metrics_of(pair, Estimator(pair.sequences, level), names)


def metrics_of(
    pair: TokenPair, estimator: Estimator, names: Collection[str] | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """`pair_metrics` with another estimator."""
    estimates: dict[str, Estimate] = {}
    unavailable: dict[str, str] = {}
    complete_pair = pair.of_whole_responses
    for family in (logprob_deviation, probability_deviation, divergence, importance_weights, agreement):
        metrics_of_complete: LazyMetrics = {}
        if complete_pair is not None and complete_pair is not pair:
            metrics_of_complete = family(complete_pair, replace(estimator, sequences=complete_pair.sequences))
        for name, compute in family(pair, estimator).items():
            if names is not None and name not in names:
                continue
            metric = compute()
            if complete_pair is not pair and isinstance(metric, Estimate) and metric.by == "sequence":
                metric = metrics_of_complete[name]() if metrics_of_complete else NONE_WHOLE
            if isinstance(metric, Estimate) and _is_finite(metric):
                estimates[name] = metric
            else:
                unavailable[name] = metric if isinstance(metric, str) else TOO_LARGE
    return estimates, unavailable


def _is_finite(estimate: Estimate) -> bool:
    return all(bound is None or math.isfinite(bound) for bound in (estimate.value, estimate.low, estimate.high))


def agreement(pair: TokenPair, estimator: Estimator) -> LazyMetrics:
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
