"""pi against mu on a step's own responses, from arrays: the same names and numbers in `train` and in `watch`."""

from collections.abc import Sequence

import numpy as np

from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair, is_usable
from mismatch_probe.stats.temperature import LeastSquares, temperature_columns
from mismatch_probe.stats.values import metric_values
from mismatch_probe.stats.weights import weight_excess

Metrics = dict[str, float]

_CERTAIN = 1e-3
_STANDARD_ERRORS = 3.0
_VARIANCE_OF_ENTROPY = 5.0
"""Nats: variance of log pi over its entropy for a choice of two tokens, one of them with a probability of 0.002."""

_MISMATCH = {
    "kl_k1": "kl_k1",
    "kl_k3": "kl_k3",
    "abs_logprob_diff": "abs_logprob_diff",
    "abs_logprob_diff_max": "abs_logprob_diff_max",
    "abs_logprob_diff_seq": "abs_logprob_diff_seq",
    "logprob_diff_rms": "logprob_diff_rms",
    "token_mult_prob_error": "token_mult_prob_error",
    "prob_abs_diff": "prob_abs_diff",
    "prob_abs_diff_max": "prob_abs_diff_max",
    "prob_diff_max": "prob_diff_extremes_max",
    "prob_diff_min": "prob_diff_extremes_min",
    "prob_pearson": "prob_pearson",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_seq",
    "log_ppl_diff": "log_ppl_diff",
    "ppl_ratio": "ppl_ratio",
    "is_ratio_mean": "is_ratio_mean_token",
    "ess_token": "ess_token",
    "ess_seq": "ess_seq",
    "kl_entropy_ratio": "kl_entropy_ratio",
}
"""Name in the log: name of `stats.metrics`."""

_OF_ENTROPY = ("kl_entropy_ratio", "temperature_fit", "surprise_excess")


def mismatch_metrics(
    lengths: Sequence[int], prompts: Sequence[str], log_mu: Floats, log_pi: Floats, entropy: Floats | None
) -> Metrics:
    """Metrics of responses of these lengths [N] to these prompts [N], from arrays [T] in nats.

    `mismatch/drift_per_1000` is the mean of S per 1,000 tokens, which is -1000 kl_k1. `mismatch/temperature_fit` is
    T_pi / T_mu fitted to d, 1 where both temperatures may be the same. Where a log-prob is missing or not finite every
    one of them is NaN, and `mismatch/nonfinite_tokens` counts them, `mismatch/missing_mu_tokens` those of mu's.
    `mismatch/is_ratio_mean_error` is the standard error of `is_ratio_mean` where it is 1: e^d - 1 of tokens sampled
    from mu are then differences of a martingale, which do not correlate. What takes pi's entropy is absent without it.
    """
    usable = is_usable(log_mu) & is_usable(log_pi)
    if entropy is not None:
        usable &= np.isfinite(entropy)
    metrics: Metrics = {
        "mismatch/nonfinite_tokens": float((~usable).sum()),
        "mismatch/missing_mu_tokens": float((~is_usable(log_mu)).sum()),
    }
    names = [
        f"mismatch/{name}"
        for name in (*_MISMATCH, "is_ratio_mean_error", "drift_per_1000", "temperature_fit", "surprise_excess")
    ]
    if entropy is None:
        names = [name for name in names if not name.endswith(_OF_ENTROPY)]
    if not usable.all():
        return metrics | dict.fromkeys(names if entropy is None else [*names, "policy/entropy"], np.nan)
    clusters = np.unique(prompts, return_inverse=True)[1]
    pair = TokenPair(Sequences.of_lengths(lengths, clusters), log_pi, log_mu, entropy_pi=entropy)
    values = metric_values(pair)
    for name in names:
        metrics[name] = values.get(_MISMATCH.get(name.removeprefix("mismatch/"), ""), np.nan)
    metrics["mismatch/is_ratio_mean_error"] = float(np.sqrt(np.mean(weight_excess(pair.diff) ** 2) / len(pair.diff)))
    metrics["mismatch/drift_per_1000"] = 1000 * float(pair.diff.mean())
    if entropy is not None:
        metrics["mismatch/temperature_fit"] = _temperature_ratio(pair.diff, log_pi, entropy)
        metrics["mismatch/surprise_excess"] = _surprise_excess(log_pi + entropy, entropy)
        metrics["policy/entropy"] = float(entropy.mean())
    return metrics


def _temperature_ratio(diff: Floats, log_pi: Floats, entropy: Floats) -> float:
    """T_pi / T_mu by `stats.temperature`, three standard errors nearer to 1.

    1 where within, and where nothing surprises pi.
    """
    if np.std(log_pi + entropy) < _CERTAIN:
        return 1.0
    fit = LeastSquares(temperature_columns(log_pi, entropy), diff)
    departure = -fit.coefficients[0]
    return float(1 + np.sign(departure) * max(0.0, abs(departure) - _STANDARD_ERRORS * fit.first_error()))


def _surprise_excess(surprise: Floats, entropy: Floats) -> float:
    """How far mean(log pi + H) is from 0, less three standard errors, in nats; 0 where within.

    It is 0 in expectation for tokens sampled from pi, whatever log-probs the engine reports for them. The terms are
    differences of a martingale, so they do not correlate. Where no unlikely token came up they vary too little; their
    variance is then taken from the entropy.
    """
    variance = max(float(np.mean(surprise**2)), _VARIANCE_OF_ENTROPY * float(entropy.mean()))
    return max(0.0, abs(float(surprise.mean())) - _STANDARD_ERRORS * float(np.sqrt(variance / len(surprise))))
