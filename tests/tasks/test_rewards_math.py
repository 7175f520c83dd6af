import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import Prompt
from mismatch_probe.tasks.rewards import TextResponse, load_reward, score_responses

pytest.importorskip("math_verify")


def score(answer: str, response: str) -> float:
    reward = load_reward("math", [Prompt("row-0", text="?", answer=answer)])
    return float(score_responses(reward, [TextResponse(EncodedPrompt("row-0", [1], "?", answer), response, False)])[0])


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("72", "so the answer is 72."),
        ("1/2", "That makes $\\frac{1}{2}$."),
        ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("$3\\sqrt{13}$", "\\boxed{3\\sqrt{13}}"),
        ("3\\sqrt{13}", "\\boxed{3\\sqrt{13}}"),
        ("x^2+1", "$1 + x^2$"),
        ("1,234", "it is 1234"),
    ],
)
def test_equal_answers_are_right_however_they_are_written(answer, response):
    assert score(answer, response) == 1


@pytest.mark.parametrize(
    ("answer", "response"), [("72", "it is 73"), ("3\\sqrt{13}", "\\boxed{3}"), ("x^2+1", "$x+1$"), ("72", "")]
)
def test_other_answers_are_wrong(answer, response):
    assert score(answer, response) == 0


def test_prompts_without_answers_are_counted_and_refused():
    prompts = [Prompt("row-0", text="?", answer="1"), Prompt("row-1", text="?"), Prompt("row-2", text="?", answer=" ")]
    with pytest.raises(UsageError, match="2 of 3 prompts have none, row-1 the first"):
        load_reward("math", prompts)


def test_an_answer_that_cannot_be_read_is_named():
    with pytest.raises(UsageError, match=r"^math-verify can read no answer in '\$\$' of prompt row-0"):
        score("$$", "1")
