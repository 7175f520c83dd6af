"""A step's metrics, by the same statistics as `compare`, from log-probs that nothing has clamped or masked."""

from collections.abc import Sequence

import numpy as np

from mismatch_probe.guards.mismatch import Metrics, mismatch_metrics
from mismatch_probe.stats.mean_error import mean_error
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.objectives.losses import LossPlan
from mismatch_probe.train.rollouts import Rollout


def step_mismatch(rollouts: Sequence[Rollout], log_pi: Floats, entropy: Floats) -> Metrics:
    """`mismatch_metrics` of a step's responses, with pi's log-probs and entropies [T]."""
    return mismatch_metrics(
        [rollout.length for rollout in rollouts],
        [rollout.prompt_id for rollout in rollouts],
        np.concatenate([rollout.mu_logprobs for rollout in rollouts]),
        log_pi,
        entropy,
    )


def reward_metrics(rollouts: Sequence[Rollout], plan: LossPlan) -> Metrics:
    """What the responses earned; the mean is NaN as soon as one reward is. Its error is clustered by prompt."""
    rewards = np.array([rollout.reward for rollout in rollouts])
    lengths = np.array([rollout.length for rollout in rollouts])
    prompts = np.unique([rollout.prompt_id for rollout in rollouts], return_inverse=True)[1]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/mean_error": mean_error(rewards, prompts),
        "reward/largest": float(np.abs(rewards[np.isfinite(rewards)]).max(initial=0.0)),
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
