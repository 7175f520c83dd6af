"""Reward functions that give something else from one step on."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from benchmarks.training_faults.injection import Now, replaced
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks.reward_calls import RewardLimits
from mismatch_probe.tasks.rewards import Reward
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.rollouts import Rollout

_BAD_EVERY: Final = 8
_LIMITS: Final = RewardLimits(workers=8, seconds=0.5)
_TOO_LONG_SECONDS: Final = 2.0


def reward_given(parts: TrainingParts, now: Now, *, bad: Callable[[float, str], Any], every: int = 1) -> None:
    """One response in `every` earns `bad(reward, response)`."""
    calls = 0

    def make(reward: Reward) -> Reward:
        def score(prompt: EncodedPrompt, response: str) -> Any:
            nonlocal calls
            calls += 1
            right = reward.score(prompt, response)
            return bad(float(right), response) if now.faulty and calls % every == 0 else right

        return replace(reward, score=score)

    replaced(parts.rollouts, "_reward", make)


def reward_nan(parts: TrainingParts, now: Now) -> None:
    """The reward function returns NaN for one response in eight."""
    reward_given(parts, now, bad=lambda right, response: float("nan"), every=_BAD_EVERY)


def reward_slow(parts: TrainingParts, now: Now) -> None:
    """One call in eight takes longer than it may."""

    def late(right: float, response: str) -> float:
        time.sleep(_TOO_LONG_SECONDS)
        return right

    reward_given(parts, now, bad=late, every=_BAD_EVERY)
    replaced(parts.rollouts, "_reward", lambda reward: replace(reward, is_users=True))
    replaced(parts.rollouts, "_limits", lambda _: _LIMITS)


def rewards_shuffled(parts: TrainingParts, now: Now) -> None:
    """Each response is given the reward of another of its step."""

    def make(sample: Callable[[int], list[Rollout]]) -> Callable[[int], list[Rollout]]:
        def shuffled(step: int) -> list[Rollout]:
            rollouts = sample(step)
            if not now.faulty:
                return rollouts
            rewards = [rollout.reward for rollout in rollouts]
            random.Random(step).shuffle(rewards)
            return [replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]

        return shuffled

    replaced(parts.rollouts, "sample", make)


def rewards_lost(parts: TrainingParts, now: Now, *, rows: int, period: int = 1) -> None:
    """The first `rows` responses earn NaN, in every `period`-th step from the onset on."""

    def make(sample: Callable[[int], list[Rollout]]) -> Callable[[int], list[Rollout]]:
        def partly_lost(step: int) -> list[Rollout]:
            rollouts = sample(step)
            if not now.faulty or (now.step - now.onset) % period:
                return rollouts
            return [replace(rollout, reward=float("nan")) for rollout in rollouts[:rows]] + rollouts[rows:]

        return partly_lost

    replaced(parts.rollouts, "sample", make)
