"""How far apart the two policies put the sampled tokens, in nats and in probability."""

import numpy as np

from mismatch_probe.stats.estimator import Estimator, Metrics
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.sequences import TokenPair

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


def logprob_deviation(pair: TokenPair, estimator: Estimator) -> Metrics:
    """abs(d) and d in nats.

    `abs_logprob_diff` is TRL's `sampling/sampling_logp_difference`; `abs_logprob_diff_seq`, the mean of per-sequence
    means, is slime's `train_rollout_logprob_abs_diff`. `token_mult_prob_error` = mean e^abs(d) is NeMo-RL's, and its
    `_max` the largest mean of one sequence.
    """
    sequences, absolute = pair.sequences, pair.abs_diff
    ordered = np.sort(absolute)
    per_sequence = sequences.sum_by_sequence(absolute) / sequences.lengths
    with np.errstate(over="ignore"):
        multiplicative = np.exp(absolute)
        worst_sequence = (sequences.sum_by_sequence(multiplicative) / sequences.lengths).max()
    metrics: Metrics = {
        "abs_logprob_diff": estimator.mean(absolute, "token", Scale.POSITIVE),
        "abs_logprob_diff_seq": estimator.mean(per_sequence, "sequence", Scale.POSITIVE),
        "abs_logprob_diff_max": estimator.bare(ordered[-1], "token"),
        "logprob_diff_rms": estimator.root_mean_square(pair.diff, "token"),
        "token_mult_prob_error": estimator.mean(multiplicative, "token", Scale.POSITIVE),
        "token_mult_prob_error_max": estimator.bare(worst_sequence, "sequence"),
    }
    for suffix, probability in QUANTILES.items():
        metrics[f"abs_logprob_diff_{suffix}"] = estimator.quantile(ordered, absolute, probability, "token")
    return metrics


def probability_deviation(pair: TokenPair, estimator: Estimator) -> Metrics:
    """e^log_pi - e^log_mu.

    verl: `training/rollout_probs_diff_mean`, `_std`, `_max` and its Pearson correlation. The signed extremes going to
    +1 and -1 at equal weights announced collapse in arXiv 2510.26788.
    """
    signed, absolute = pair.prob_diff, np.abs(pair.prob_diff)
    correlation = estimator.correlation(pair.prob_pi, pair.prob_mu, "token")
    return {
        "prob_abs_diff": estimator.mean(absolute, "token", Scale.POSITIVE),
        "prob_abs_diff_std": estimator.standard_deviation(absolute, "token"),
        "prob_abs_diff_max": estimator.bare(absolute.max(), "token"),
        "prob_diff_extremes_max": estimator.bare(signed.max(), "token"),
        "prob_diff_extremes_min": estimator.bare(signed.min(), "token"),
        "prob_pearson": correlation or "the token probabilities of one side do not vary",
    }
