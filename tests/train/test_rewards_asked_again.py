"""Do rewards belong to their responses? Asked again of a few, on runs with and without a mix-up."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.config.train import RolloutSettings
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import encode_prompts, load_prompts, load_tokenizer
from mismatch_probe.tasks.reward_calls import SEQUENTIAL
from mismatch_probe.tasks.rewards import Repeats, Reward, TextResponse, ask_again
from mismatch_probe.train.rollouts import Rollouts
from tests.train.quick_runs import StoppingEngine

pytestmark = pytest.mark.usefixtures("process_group")


ANSWERED = TextResponse(EncodedPrompt("0", [1], "1 + 1 = "), "2", truncated=False)


def by_text(prompt: EncodedPrompt, text: str) -> float:
    return float(sum(map(ord, text)) % 97)


@pytest.fixture
def sampler(llama: Path) -> Rollouts:
    tokenizer = load_tokenizer(llama)
    prompts = load_prompts(PromptSettings(source="sums:easy", num_prompts=4), 0)
    problems = encode_prompts(prompts, tokenizer, "never", 320, 2048)
    settings = RolloutSettings(prompts=4, samples=2, max_new_tokens=6)
    return Rollouts(StoppingEngine(llama), problems, tokenizer, Reward("by-text", by_text), settings, seed=0)


def test_rewards_of_their_own_responses_repeat(sampler: Rollouts) -> None:
    assert sampler.repeat_rewards(1, sampler.sample(0)) == Repeats().metrics()


def test_rewards_of_other_responses_do_not(sampler: Rollouts) -> None:
    rollouts = sampler.sample(0)
    rewards = [rollout.reward for rollout in rollouts]
    shifted = [
        replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards[1:] + rewards[:1], strict=True)
    ]
    assert len(set(rewards)) > 4
    again = sampler.repeat_rewards(1, shifted)
    assert again["reward/mispaired"] == again["reward/mispaired_error"] ** 2 == again["reward/unrepeated"] >= 3


def test_where_every_response_was_cut_there_is_nothing_to_ask(sampler: Rollouts) -> None:
    assert sampler.repeat_rewards(1, []) == Repeats().metrics()


@pytest.mark.parametrize("changes_its_mind", [0.05, 0.3, 0.5])
def test_a_judge_that_changes_its_mind_is_of_its_first_opinion_as_often_as_of_its_second(
    changes_its_mind: float,
) -> None:
    random = np.random.default_rng(0)
    judge = Reward("by chance", lambda prompt, text: float(random.random() < changes_its_mind))
    first = np.array([judge.score(ANSWERED.prompt, ANSWERED.text) for _ in range(4000)])
    again = ask_again(judge, [ANSWERED] * 4000, first, float(first.std()), SEQUENTIAL)
    assert again.differ > 300
    assert abs(again.with_second - again.with_first) < 4 * math.sqrt(again.differ)
    assert again.with_second + again.with_first == again.differ


def test_an_answer_that_is_neither_says_nothing() -> None:
    answers = iter([1.0, 2.0])
    judge = Reward("new each time", lambda prompt, text: next(answers))
    assert ask_again(judge, [ANSWERED], np.array([0.0]), 0.5, SEQUENTIAL) == Repeats(differ=1)


@pytest.mark.parametrize(("moved", "differ"), [(0.05, 0), (0.3, 4)])
def test_a_reward_model_that_rounds_otherwise_among_other_responses_repeats(moved: float, differ: int) -> None:
    """The first time among all of a step's, then among four: in 16 bit its sums are then added in another order."""
    model = Reward("in few", lambda prompt, text: 2.0)
    again = ask_again(model, [ANSWERED] * 4, np.full(4, 2.0 + moved), 1.0, SEQUENTIAL)
    assert again == Repeats(differ, differ, 0)


def test_a_vote_within_a_list_is_not_taken_for_rewards_of_other_responses() -> None:
    def vote(prompts: Sequence[EncodedPrompt], texts: Sequence[str]) -> list[float]:
        return [float(texts.count(text) > len(texts) / 2) for text in texts]

    complete_answers = [replace(ANSWERED, text=text) for text in "2" * 5 + "3" * 3]
    voted = Reward("vote", by_text, vote)
    first = np.array(vote([], [answer.text for answer in complete_answers]))
    assert ask_again(voted, complete_answers[-2:], first[-2:], 0.5, SEQUENTIAL) == Repeats(differ=2)
