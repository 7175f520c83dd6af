"""Engines that sample from another distribution than they were told to, or say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.training_faults.injection import Now, replaced
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.records.sequences import SampledSequence, SampleRequest
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.rollouts import Rollout


def sampling_changed(parts: TrainingParts, now: Now, **changes: float) -> None:
    """The engine samples with other settings than it is told, and its log-probs are of these."""
    engine: Any = parts.engine

    def make(generate: Callable[..., Any]) -> Callable[..., Any]:
        def otherwise(inputs: Any, params: Sequence[Any], **rest: Any) -> Any:
            for param in params:
                if now.faulty and param.temperature > 0:
                    for name, value in changes.items():
                        setattr(param, name, value)
            return generate(inputs, params, **rest)

        return otherwise

    replaced(engine.llm, "generate", make)


def sampling_hidden(parts: TrainingParts, now: Now, **changes: float) -> None:
    """As `sampling_changed`, and the log-probs are those of the settings it was told."""
    sampling_changed(parts, now, **changes)

    def make(sample: Callable[..., list[SampledSequence]]) -> Callable[..., list[SampledSequence]]:
        def unseen(requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
            sampled = sample(requests, sampling)
            if not now.faulty:
                return sampled
            replayed_scores = parts.engine.replay([response.sequence for response in sampled])
            return [
                replace(each_sample, scores=scores)
                for each_sample, scores in zip(sampled, replayed_scores, strict=True)
            ]

        return unseen

    replaced(parts.engine, "sample", make)


def training_temperature(parts: TrainingParts, now: Now, *, temperature: float) -> None:
    """The training path divides its logits by another temperature than the engine."""
    module: Any = parts.policy.module

    def make(send: Callable[..., None]) -> Callable[..., None]:
        def first_divide(**how: bool) -> None:
            if now.faulty:
                replaced(module, "_temperature", lambda _: temperature)
            send(**how)

        return first_divide

    replaced(parts.sync, "send", make)


def labels_shifted(parts: TrainingParts, now: Now) -> None:
    """The training path scores the token after the one that was sampled."""
    module: Any = parts.policy.module

    def make(answer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda hidden, targets: answer(hidden, targets.roll(-1) if now.faulty else targets)

    replaced(module, "_answer_questions", make)


def ends_dropped(parts: TrainingParts, now: Now) -> None:
    """The token that ends a response is in no record of it, nor in the loss."""

    def without(rollout: Rollout) -> Rollout:
        if rollout.truncated or rollout.length < 2:
            return rollout
        sequence = replace(rollout.sequence, token_ids=rollout.sequence.token_ids[:-1])
        return replace(rollout, sequence=sequence, mu_logprobs=rollout.mu_logprobs[:-1])

    def make(sample: Callable[[int], list[Rollout]]) -> Callable[[int], list[Rollout]]:
        return lambda step: [without(rollout) if now.faulty else rollout for rollout in sample(step)]

    replaced(parts.rollouts, "sample", make)


def all_cut(parts: TrainingParts, now: Now, *, tokens: int) -> None:
    """Responses may have a few tokens only, so that none ends."""
    engine: Any = parts.engine

    def make(generate: Callable[..., Any]) -> Callable[..., Any]:
        def shorter(inputs: Any, params: Sequence[Any], **rest: Any) -> Any:
            for param in params:
                if now.faulty and param.temperature > 0:
                    param.max_tokens = tokens
            return generate(inputs, params, **rest)

        return shorter

    replaced(engine.llm, "generate", make)
