"""What a step's objective makes of its responses, with what guards changed."""

import math
from collections.abc import Sequence

import numpy as np

from mismatch_probe.config.train import TrainSettings
from mismatch_probe.train.learner import Scored, rollout_batch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import LossPlan, plan_loss
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.state import Adjustments


def plan_step(
    settings: TrainSettings, adjustments: Adjustments, rollouts: Sequence[Rollout], scored: Scored
) -> LossPlan:
    """Advantages and weights of every response."""
    overrides = dict(settings.objective.overrides)
    if adjustments.correction is not None:
        overrides = {key: value for key, value in overrides.items() if key != "threshold"}
        overrides["correction"] = adjustments.correction
    objective = build_objective(settings.objective.name, overrides)
    included = _included(settings, adjustments, rollouts, scored)
    batch = rollout_batch(rollouts, scored.log_pi_T, included, scored.values_T)
    return plan_loss(objective, batch, settings.rollout.max_new_tokens)


def sequence_ratios(rollouts: Sequence[Rollout], scored: Scored) -> list[float]:
    """abs(S) of each response, nats."""
    ends = np.cumsum([rollout.length for rollout in rollouts])[:-1]
    parts = zip(rollouts, np.split(scored.log_pi_T, ends), strict=True)
    return [abs(float((log_pi - rollout.mu_logprobs).sum())) for rollout, log_pi in parts]


def rows_of_update(settings: TrainSettings, num_rollouts: int, update: int) -> list[int]:
    """Whole groups in turn, so that every update sees all samples of its problems."""
    samples, updates = settings.rollout.samples, settings.rollout.updates
    return [row for row in range(num_rollouts) if row // samples % updates == update]


def _included(
    settings: TrainSettings, adjustments: Adjustments, rollouts: Sequence[Rollout], scored: Scored
) -> list[bool]:
    """Which responses are in the loss: those whose reward is a number, truncated ones where asked for, those within the
    bound on abs(S).
    """
    masked = settings.task.truncated == "masked"
    bound = math.inf if adjustments.sequence_bound is None else adjustments.sequence_bound
    return [
        math.isfinite(rollout.reward) and not (masked and rollout.truncated) and not ratio > bound
        for rollout, ratio in zip(rollouts, sequence_ratios(rollouts, scored), strict=True)
    ]
