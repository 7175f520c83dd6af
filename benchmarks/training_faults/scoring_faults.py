"""Two sides that should score the same and do not: other positions, tokens, places, or old weights on one side."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from benchmarks.training_faults.injection import Now, replaced
from mismatch_probe.train.learner import PolicyScores
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.rollouts import Rollout

_OTHER_TOKEN: Final = 7

Sample = Callable[[int], list[Rollout]]


def positions_scaled(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """The training path rotates by `factor` times the angles (RoPE), the engine as it should."""
    rotary: Any = parts.policy.module.get_submodule("model.model.rotary_emb")
    frequencies = rotary.inv_freq.clone()

    def make(send: Callable[..., None]) -> Callable[..., None]:
        def first_scale(**how: bool) -> None:
            rotary.inv_freq.copy_(frequencies * (factor if now.faulty else 1.0))
            send(**how)

        return first_scale

    replaced(parts.sync, "send", make)


def scored_by_old_weights(parts: TrainingParts, now: Now) -> None:
    """The trainer's log-probs and entropies of responses are those of the weights at the onset; it learns as before."""
    old: dict[str, torch.Tensor] = {}
    module = parts.policy.module

    def make(score: Callable[..., PolicyScores]) -> Callable[..., PolicyScores]:
        def score_behind(rollouts: Sequence[Rollout], *, keep_graph: bool) -> PolicyScores:
            if not now.faulty:
                return score(rollouts, keep_graph=keep_graph)
            newest = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
            if not old:
                old.update(deepcopy(newest))
            _hold(module, old)
            frozen = score(rollouts, keep_graph=False)
            _hold(module, newest)
            return replace(score(rollouts, keep_graph=keep_graph), log_pi_T=frozen.log_pi_T, entropy_T=frozen.entropy_T)

        return score_behind

    replaced(parts.updater, "score", make)


def _hold(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])


def mu_shifted(parts: TrainingParts, now: Now) -> None:
    """The engine's log-probs are recorded one place late."""
    _sampled(parts, now, lambda rollout: replace(rollout, mu_logprobs=np.roll(rollout.mu_logprobs, 1)))


def batch_repeated(parts: TrainingParts, now: Now) -> None:
    """From the onset on each step is given the responses of the onset."""
    first: list[Rollout] = []

    def make(sample: Sample) -> Sample:
        def repeated(step: int) -> list[Rollout]:
            rollouts = sample(step)
            if now.faulty and not first:
                first.extend(rollouts)
            return list(first) if now.faulty else rollouts

        return repeated

    replaced(parts.rollouts, "sample", make)


def token_replaced(parts: TrainingParts, now: Now) -> None:
    """One token in the middle of each response reaches the trainer as another one."""

    def with_another(rollout: Rollout) -> Rollout:
        ids = rollout.sequence.token_ids
        place = (len(ids) - 1) // 2
        other = [*ids[:place], _OTHER_TOKEN, *ids[place + 1 :]]
        return replace(rollout, sequence=replace(rollout.sequence, token_ids=other)) if len(ids) > 1 else rollout

    _sampled(parts, now, with_another)


def _sampled(parts: TrainingParts, now: Now, change: Callable[[Rollout], Rollout]) -> None:
    def make(sample: Sample) -> Sample:
        return lambda step: [change(rollout) if now.faulty else rollout for rollout in sample(step)]

    replaced(parts.rollouts, "sample", make)
