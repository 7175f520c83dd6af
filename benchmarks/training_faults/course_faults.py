"""What changes the course of a run: problems that get harder, and a loss that rewards being sure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from benchmarks.training_faults.injection import Now, optimizer_of, replaced
from benchmarks.training_faults.update_faults import applied_rate
from mismatch_probe.config.model import PromptSettings
from mismatch_probe.tasks import load_prompts
from mismatch_probe.tasks.encoding import encode_prompts
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.rollouts import Rollout

LONGER: Final = {"rollout": {"max_new_tokens": 120}}
"""Settings of a run whose problems get harder: their answers are longer, too."""
UNSURE: Final = {"rollout": {"temperature": 2.0}, "checks": {"max_cost": 1e-6}}
"""Settings of a run that has much entropy to lose and hardly ever probes: else `update-size` sees the loss first."""

Sample = Callable[[int], list[Rollout]]


def problems_harder(parts: TrainingParts, now: Now, *, source: str) -> None:
    """From the onset on other problems are sampled, whose rewards are as right as before: a curriculum's next stage."""
    tokenizer = parts.tokenizer
    prompts = load_prompts(PromptSettings(source=source, num_prompts=64))
    harder = [
        replace(problem, prompt_id=f"harder/{problem.prompt_id}")
        for problem in encode_prompts(prompts, tokenizer, "auto")
    ]

    def make(sample: Sample) -> Sample:
        def of_the_stage(step: int) -> list[Rollout]:
            if now.faulty:
                parts.rollouts.restrict(harder)
            return sample(step)

        return of_the_stage

    replaced(parts.rollouts, "sample", make)


def entropy_penalised(parts: TrainingParts, now: Now, *, weight: float, rate: float) -> None:
    """An entropy bonus of the wrong sign, at `rate` times the logged rate: `weight` times the mean entropy of
    the step's tokens is added to the loss.
    """
    applied_rate(parts, now, factor=rate)
    module: Any = parts.policy.module
    optimizer = optimizer_of(parts)

    def make_score(score: Callable[..., Any]) -> Callable[..., Any]:
        def with_gradient(hidden: torch.Tensor, targets: torch.Tensor) -> Any:
            logprobs, entropy = score(hidden, targets)
            if not now.faulty or not torch.is_grad_enabled():
                return logprobs, entropy
            logits = module._head.logits(hidden).float() / module._temperature
            log_softmax = torch.log_softmax(logits, dim=-1)
            return logprobs, -(log_softmax.exp() * log_softmax).sum(dim=-1)

        return with_gradient

    def make_accumulate(accumulate: Callable[..., Any]) -> Callable[..., Any]:
        def penalised(update: Any, rollouts: Sequence[Rollout], rows: Sequence[int], scored: Any) -> Any:
            if now.faulty:
                with torch.enable_grad(), parts.policy.computing():
                    _, entropies = parts.policy.logprobs([rollouts[row].sequence for row in rows])
                    (weight * optimizer.scale * entropies.mean()).backward()
            return accumulate(update, rollouts, rows, scored)

        return penalised

    replaced(module, "_score_questions", make_score)
    replaced(parts.updater, "accumulate", make_accumulate)
