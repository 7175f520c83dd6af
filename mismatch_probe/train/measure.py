"""A step's metrics, by the same statistics as `compare`, from log-probs that nothing has clamped or masked."""

from collections.abc import Collection, Sequence

import numpy as np

from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.objectives.losses import LossPlan
from mismatch_probe.train.rollouts import Rollout


def response_metrics(
    rollouts: Sequence[Rollout], log_pi: Floats, entropy: Floats, end_tokens: Collection[int] = ()
) -> Metrics:
    """What a step's responses are and earned, with pi's log-probs and entropies before the update [T].

    end_tokens: those that end a response, where they are known.
    """
    ends = np.cumsum([rollout.length for rollout in rollouts])[:-1]
    batch = Batch(
        np.split(log_pi, ends),
        [rollout.mu_logprobs for rollout in rollouts],
        entropy=np.split(entropy, ends),
        prompt_ids=[rollout.prompt_id for rollout in rollouts],
        rewards=[rollout.reward for rollout in rollouts],
        truncated=[rollout.truncated for rollout in rollouts],
        in_part=False,
    )
    unended = [not rollout.truncated and rollout.sequence.token_ids[-1] not in end_tokens for rollout in rollouts]
    return {
        **batch.measure().metrics(),
        "reward/late": float(sum(rollout.is_late for rollout in rollouts)),
        "response/unended_share": float(np.mean(unended)) if end_tokens else 0.0,
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
