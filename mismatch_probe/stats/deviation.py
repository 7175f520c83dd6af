"""How far apart the two policies put the sampled tokens, in nats and in probability."""

from functools import cache, partial

import numpy as np

from mismatch_probe.stats.estimator import Estimator, Metrics
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.stats.tails import ErrorTail
from mismatch_probe.stats.weights import tail_of

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


def logprob_deviation(pair: TokenPair, estimator: Estimator) -> Metrics:
    """abs(d) and d in nats.

    `abs_logprob_diff` is TRL's `sampling/sampling_logp_difference`; `abs_logprob_diff_seq`, the mean of per-sequence
    means, is slime's `train_rollout_logprob_abs_diff`. `token_mult_prob_error` = mean e^abs(d) is NeMo-RL's, and its
    `_max` the largest mean of one sequence.
    """

    @cache
    def ordered() -> Floats:
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
        return None if more_than_1 is None else estimator.mapped(more_than_1, lambda excess: 1 + excess)

    def mean_of_each(values: Floats) -> Floats:
        return pair.sequences.sum_by_sequence(values) / pair.sequences.lengths

    def quantile(probability: float) -> Estimate:
        return estimator.quantile(ordered(), pair.abs_diff, probability, "token")

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


def probability_deviation(pair: TokenPair, estimator: Estimator) -> Metrics:
    """e^log_pi - e^log_mu.

    verl: `training/rollout_probs_diff_mean`, `_std`, `_max` and its Pearson correlation. The signed extremes going to
    +1 and -1 at equal weights announced collapse in arXiv 2510.26788.
    """

    @cache
    def signed() -> Floats:
        return pair.prob_diff

    @cache
    def absolute() -> Floats:
        return np.abs(signed())

    def pearson() -> Estimate | str:
        correlation = estimator.correlation(pair.prob_pi, pair.prob_mu, "token")
        return correlation or "the token probabilities of one side do not vary"

    return {
        "prob_abs_diff": lambda: estimator.mean(absolute(), "token", Scale.POSITIVE),
        "prob_abs_diff_std": lambda: estimator.standard_deviation(absolute(), "token"),
        "prob_abs_diff_max": lambda: estimator.bare(absolute().max(), "token"),
        "prob_diff_extremes_max": lambda: estimator.bare(signed().max(), "token"),
        "prob_diff_extremes_min": lambda: estimator.bare(signed().min(), "token"),
        "prob_pearson": pearson,
    }
