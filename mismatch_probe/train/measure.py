"""A step's metrics, by the same statistics as `compare`, from log-probs that nothing has clamped or masked."""

from collections.abc import Sequence

import numpy as np

from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair, is_usable
from mismatch_probe.stats.temperature import LeastSquares, temperature_columns
from mismatch_probe.stats.values import metric_values
from mismatch_probe.train.objectives.losses import LossPlan
from mismatch_probe.train.rollouts import Rollout

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


def mismatch_metrics(rollouts: Sequence[Rollout], log_pi: Floats, entropy: Floats) -> Metrics:
    """pi against mu on the step's own responses; all arrays [T], nats.

    `mismatch/drift_per_1000` is the mean of S per 1,000 tokens, which is -1000 kl_k1. `mismatch/temperature_fit` is
    T_pi / T_mu fitted to d, 1 where both temperatures may be the same. Where a log-prob is missing or not finite every
    one of them is NaN, and `mismatch/nonfinite_tokens` counts them.
    """
    log_mu = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
    usable = is_usable(log_mu) & is_usable(log_pi) & np.isfinite(entropy)
    metrics: Metrics = {"mismatch/nonfinite_tokens": float((~usable).sum())}
    names = [f"mismatch/{name}" for name in (*_MISMATCH, "drift_per_1000", "temperature_fit", "surprise_excess")]
    if not usable.all():
        return metrics | dict.fromkeys([*names, "policy/entropy"], np.nan)
    lengths = [rollout.length for rollout in rollouts]
    clusters = np.unique([rollout.prompt_id for rollout in rollouts], return_inverse=True)[1]
    pair = TokenPair(Sequences.of_lengths(lengths, clusters), log_pi, log_mu, entropy_pi=entropy)
    values = metric_values(pair)
    for name, canonical in _MISMATCH.items():
        metrics[f"mismatch/{name}"] = values.get(canonical, np.nan)
    metrics["mismatch/drift_per_1000"] = 1000 * float(pair.diff.mean())
    metrics["mismatch/temperature_fit"] = _temperature_ratio(pair.diff, log_pi, entropy)
    metrics["mismatch/surprise_excess"] = _surprise_excess(log_pi + entropy, entropy)
    metrics["policy/entropy"] = float(entropy.mean())
    return metrics


def reward_metrics(rollouts: Sequence[Rollout], plan: LossPlan) -> Metrics:
    """What the responses earned; the mean is NaN as soon as one reward is."""
    rewards = np.array([rollout.reward for rollout in rollouts])
    lengths = np.array([rollout.length for rollout in rollouts])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/nonfinite": float((~np.isfinite(rewards)).sum()),
        "reward/flat_groups_share": plan.num_flat_groups / plan.num_groups,
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_share": float(np.mean([rollout.truncated for rollout in rollouts])),
    }


def correction_metrics(plan: LossPlan) -> Metrics:
    """What was left out of the loss before the objective's correction, and what that did to the step's tokens."""
    corrected = plan.corrected
    return {
        "correction/excluded_share": float((~plan.batch.included_N).double().mean()),
        "correction/clipped_share": corrected.share_clipped,
        "correction/rejected_share": corrected.share_rejected,
        "correction/ess": np.nan if corrected.ess is None else corrected.ess,
    }


def value_metrics(plan: LossPlan) -> Metrics:
    """How well the critic foresaw, before the update, what its tokens came to; nothing without a critic.

    `critic/explained_variance` is 1 - Var(R - V) / Var(R) over tokens in the loss, with R the returns that the values V
    learn from: 1 is perfect, below 0 is worse than a constant, NaN where all returns are equal.
    """
    if plan.returns_T is None or plan.batch.values_T is None:
        return {}
    included_T = plan.batch.included_T
    returns, values = (given_T[included_T].numpy() for given_T in (plan.returns_T, plan.batch.values_T))
    spread = np.var(returns) if len(returns) else 0.0
    return {
        "critic/explained_variance": float(1 - np.var(returns - values) / spread) if spread > 0 else np.nan,
        "critic/value_mean": float(values.mean()) if len(values) else np.nan,
    }


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
