"""Do rewards belong to their responses? Asked again of a few, on runs with and without a mix-up."""

from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.config.train import RolloutSettings
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import encode_prompts, load_prompts, load_tokenizer
from mismatch_probe.tasks.rewards import Reward
from mismatch_probe.train.rollouts import Rollouts
from tests.train.quick_runs import StoppingEngine

pytestmark = pytest.mark.usefixtures("process_group")


def by_text(prompt: EncodedPrompt, text: str) -> float:
    return float(sum(map(ord, text)))


@pytest.fixture
def sampler(llama: Path) -> Rollouts:
    tokenizer = load_tokenizer(llama)
    prompts = load_prompts(PromptSettings(source="sums:easy", num_prompts=4), 0)
    problems = encode_prompts(prompts, tokenizer, "never", 320, 2048)
    settings = RolloutSettings(prompts=4, samples=2, max_new_tokens=6)
    return Rollouts(StoppingEngine(llama), problems, tokenizer, Reward("by-text", by_text), settings, seed=0)


def test_rewards_of_their_own_responses_repeat(sampler: Rollouts) -> None:
    assert sampler.unrepeated(1, sampler.sample(0)) == 0


def test_rewards_of_other_responses_do_not(sampler: Rollouts) -> None:
    rollouts = sampler.sample(0)
    rewards = [rollout.reward for rollout in rollouts]
    shifted = [
        replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards[1:] + rewards[:1], strict=True)
    ]
    assert len(set(rewards)) > 4
    assert sampler.unrepeated(1, shifted) >= 3


def test_where_every_response_was_cut_there_is_nothing_to_ask(sampler: Rollouts) -> None:
    assert sampler.unrepeated(1, []) == 0
