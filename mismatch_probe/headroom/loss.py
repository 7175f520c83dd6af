# ruff: noqa: N803, N806 - shape suffixes
"""The loss of one RL update over the sampled responses, by `train`'s objectives, for a model of any format."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mismatch_probe.config.headroom import HeadroomSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.headroom.responses import RewardedResponses
from mismatch_probe.train.objectives.batch import RolloutBatch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.choices import GROUP_RULES, Objective
from mismatch_probe.train.objectives.losses import plan_loss, policy_loss


def load_objective(settings: HeadroomSettings) -> Objective:
    """
    Raises:
        UsageError: no such objective, one with a critic, whose values no checkpoint holds, or one that compares the
            responses to a prompt where there is but one.
    """
    objective = build_objective(settings.objective.name, settings.objective.overrides)
    if objective.critic is not None:
        raise UsageError(
            f"objective {objective.name} needs a critic, which a checkpoint does not hold; give --objective grpo or "
            "another without one"
        )
    if objective.advantage in GROUP_RULES and settings.sampling.samples_per_prompt < 2:
        raise UsageError(
            f"objective {objective.name} compares the responses to one prompt, and there is only one; give "
            "--samples-per-prompt 2 or more, or --objective reinforce"
        )
    return objective


class ResponseLoss:
    """The first update after sampling: pi is the policy that sampled, so every importance ratio is 1."""

    def __init__(self, objective: Objective, responses: RewardedResponses, max_new_tokens: int) -> None:
        lengths = [len(sequence.token_ids) for sequence in responses.sequences]
        nothing_T = torch.zeros(sum(lengths), dtype=torch.float64)
        batch = RolloutBatch(
            rewards_N=torch.tensor(responses.rewards, dtype=torch.float64),
            group_ids_N=torch.from_numpy(np.unique(responses.prompt_ids, return_inverse=True)[1]),
            lengths_N=torch.tensor(lengths),
            included_N=torch.ones(len(lengths), dtype=torch.bool),
            old_logprobs_T=nothing_T,
            mu_logprobs_T=nothing_T,
        )
        self._update = plan_loss(objective, batch, max_new_tokens).update()

    def __call__(self, logprobs_T: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The share of some responses, with their log-probs in that order."""
        update = self._update
        batch = update.plan.batch
        old_T = batch.old_logprobs_T.clone()
        tokens = batch.responses.tokens_of(torch.tensor(rows))
        old_T[tokens] = logprobs_T.detach().double().cpu()
        plan = replace(update.plan, batch=replace(batch, old_logprobs_T=old_T))
        return policy_loss(replace(update, plan=plan), logprobs_T, rows).loss
