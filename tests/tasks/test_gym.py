import pytest

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import Prompt, load_prompts
from mismatch_probe.tasks.rewards import TextResponse, load_reward, score_responses

pytest.importorskip("reasoning_gym")


def load(name: str, num_prompts: int = 3, seed: int = 0) -> list[Prompt]:
    return load_prompts(PromptSettings(source=f"gym:{name}", num_prompts=num_prompts), seed)


def scores(prompts: list[Prompt], *texts: str) -> list[float]:
    found = [
        TextResponse(EncodedPrompt(prompt.prompt_id, [1], "", prompt.answer), text, False)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return score_responses(load_reward(None, prompts), found).tolist()


def test_problems_follow_from_the_seed():
    assert load("chain_sum", seed=1) == load("chain_sum", seed=1) != load("chain_sum", seed=2)
    assert [prompt.prompt_id for prompt in load("chain_sum")] == ["chain_sum-0", "chain_sum-1", "chain_sum-2"]


@pytest.mark.parametrize("name", ["chain_sum", "prime_factorization", "word_ladder", "acre"])
def test_a_problems_own_answer_earns_everything_in_tags_or_alone(name):
    prompts = load(name, 2)
    assert scores(prompts, f"So <answer>1</answer>, no: <answer> {prompts[0].answer} </answer>", prompts[1].answer) == [
        1,
        1,
    ]


def test_the_answer_of_another_problem_earns_nothing():
    first, second, _ = load("chain_sum")
    assert first.answer != second.answer
    assert scores([first, second], f"<answer>{second.answer}</answer>", f"<answer>{first.answer}</answer>") == [0, 0]


def test_a_text_that_the_scorer_cannot_read_earns_nothing():
    prompts = load("prime_factorization", 1)
    assert scores(prompts, "two times two, of course") == [0]


def test_an_unknown_task_is_refused_with_the_nearest_one():
    with pytest.raises(UsageError, match=r"no task 'chain_sums'; did you mean gym:chain_sum\?"):
        load("chain_sums")


def test_a_task_that_has_no_defaults_is_refused():
    with pytest.raises(UsageError, match="gym:composite cannot be made"):
        load("composite")
