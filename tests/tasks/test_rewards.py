import math
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import Prompt, load_prompts
from mismatch_probe.tasks.reward_calls import RewardLimits
from mismatch_probe.tasks.rewards import Reward, TextResponse, judge_responses, load_reward, score_responses

FILE_PROMPTS = [Prompt("row-0", text="What is 2+2?", answer="4"), Prompt("row-1", text="Hi")]


def answered(text: str, answer: str | None = "4", prompt_id: str = "row-0", *, truncated: bool = False) -> TextResponse:
    return TextResponse(EncodedPrompt(prompt_id, [1, 2], "What is 2+2?", answer), text, truncated)


def scored_by(function, *responses: TextResponse) -> list[float]:
    return score_responses(Reward("mine:score", function), responses).tolist()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the user's into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(code: str, name: str = "my_rewards") -> Path:
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        return path

    return write


def test_a_built_in_task_checks_its_own_answers():
    prompts = load_prompts(PromptSettings(source="sums:easy", num_prompts=2))
    reward = load_reward(None, prompts)
    right = answered(f"1:1;2:1+1={prompts[0].answer}", prompts[0].answer)
    wrong = answered(f"1:1;2:1+1={prompts[0].answer}0", prompts[0].answer)
    assert score_responses(reward, [right, wrong]).tolist() == [1, 0]


def test_a_truncated_response_earns_nothing_and_is_not_looked_at():
    looked_at = []

    def score(prompt, text):
        looked_at.append(text)
        return 1.0

    assert scored_by(score, answered("a"), answered("b", truncated=True), answered("c")) == [1, 0, 1]
    assert looked_at == ["a", "c"]


def test_rewards_are_float64_and_none_is_lost_where_there_is_nothing_to_score():
    assert score_responses(Reward("mine:score", lambda prompt, text: True), []).dtype == np.float64


def test_a_function_of_the_users_sees_the_prompt_the_response_and_the_answer(module):
    module("def score(prompt, response, answer):\n    return len(prompt) * (response == answer)\n")
    reward = load_reward("my_rewards:score", FILE_PROMPTS)
    assert score_responses(reward, [answered("4"), answered("5"), answered("4", None)]).tolist() == [12, 0, 0]


@pytest.mark.parametrize(
    "value", [1, True, 0.5, np.float32(0.5), np.bool_(True), np.int64(2), np.array(0.5), torch.tensor(0.5)], ids=repr
)
def test_anything_that_is_one_number_is_a_reward(value):
    assert scored_by(lambda prompt, text: value, answered("4")) == [float(value)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_reaches_the_guards_as_it_is(value):
    found = scored_by(lambda prompt, text: value, answered("4"), answered("5"))
    assert np.array_equal(found, [value, value], equal_nan=True)


@pytest.mark.parametrize("value", [None, "1", b"1", [1.0], 1j, torch.tensor([1.0, 2.0]), 10**400], ids=repr)
def test_anything_else_is_refused_with_the_function_and_the_response_named(value):
    with pytest.raises(
        UsageError, match=r"mine:score returned .* for the response 'so 4' to prompt row-7, not a number"
    ):
        scored_by(lambda prompt, text: value, answered("so 4", prompt_id="row-7"))


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("return int(response)", "ValueError (invalid literal for int() with base 10: 'four')"),
        ("return json.loads(response)", "JSONDecodeError (Expecting value: line 1 column 1 (char 0))"),
        ("raise SystemExit(0)", "SystemExit (0)"),
    ],
)
def test_what_a_function_raises_is_named_with_the_line_of_the_users_file_and_the_response(module, code, named):
    path = module(f"import json\ndef score(prompt, response, answer):\n    {code}\n")
    with pytest.raises(UsageError) as error:
        score_responses(load_reward("my_rewards:score", FILE_PROMPTS), [answered("four", prompt_id="row-7")])
    message = (
        f"reward my_rewards:score raised {named} at line 3 of {path} on the response 'four' to prompt row-7; fix it"
    )
    assert str(error.value) == message
    assert error.value.__cause__ is not None


def test_a_long_response_is_named_by_its_beginning():
    with pytest.raises(UsageError, match=r"response 'x{60}\.\.\.' to"):
        scored_by(lambda prompt, text: None, answered("x" * 1000))


def test_an_interrupt_is_no_error_of_the_function():
    def score(prompt, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored_by(score, answered("4"))


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("", "no_such_module:score", "there is no module 'no_such_module'"),
        ("", "no_such_package.module:score", "there is no module 'no_such_package.module'"),
        ("", "my_rewards.deeper:score", "there is no module 'my_rewards.deeper'"),
        ("", ":score", "there is no module ''"),
        (
            "import no_such_package",
            "my_rewards:score",
            r"ModuleNotFoundError .* at line 1 of .*my_rewards.py as it was",
        ),
        ("1 / 0", "my_rewards:score", r"ZeroDivisionError \(division by zero\) at line 1 of .*my_rewards.py"),
        ("raise SystemExit", "my_rewards:score", "raised SystemExit"),
        ("def scores(): pass", "my_rewards:score", "did you mean my_rewards:scores"),
        ("", "my_rewards:score", r"has no 'score'; write def score\(prompt: str, response: str, answer"),
        ("score = 3", "my_rewards:score", "is no plain function"),
        ("async def score(prompt, response, answer): return 1", "my_rewards:score", "is no plain function"),
        ("def score(text): return 1", "my_rewards:score", r"cannot be called .*; write def score\(prompt"),
        ("def score(prompt, response): return 1", "my_rewards:score", r"unexpected keyword argument 'answer'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_anything_starts(module, code, name, message):
    module(code)
    with pytest.raises(UsageError, match=message):
        load_reward(name, FILE_PROMPTS)


def users(function, *, workers: int, seconds: float, responses: str) -> tuple[list[float], list[bool]]:
    reward = Reward("mine:score", function, is_users=True)
    judged = judge_responses(reward, [answered(text) for text in responses], RewardLimits(workers, seconds))
    return judged.rewards.tolist(), judged.is_late.tolist()


def test_calls_run_side_by_side_and_their_rewards_keep_their_order():
    together = threading.Barrier(4, timeout=20)

    def score(prompt, text):
        together.wait()
        return float(text)

    assert users(score, workers=4, seconds=30, responses="12345678")[0] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_a_call_that_takes_too_long_gives_no_reward_and_holds_up_no_other():
    ever = threading.Event()

    def score(prompt, text):
        if text in "26":
            ever.wait()
        return float(text)

    begun = time.monotonic()
    rewards, late = users(score, workers=2, seconds=0.3, responses="12345678")
    assert time.monotonic() - begun < 20
    assert np.array_equal(rewards, [1, math.nan, 3, 4, 5, math.nan, 7, 8], equal_nan=True)
    assert [row for row, is_late in enumerate(late) if is_late] == [1, 5]
    ever.set()


def test_one_worker_calls_in_the_main_thread_where_signals_work():
    seen = set()

    def score(prompt, text):
        seen.add(threading.current_thread())
        return 1.0

    users(score, workers=1, seconds=0.1, responses="123")
    assert seen == {threading.main_thread()}


def test_what_a_call_in_a_thread_raises_is_told_as_ever():
    def score(prompt, text):
        return float(text)

    with pytest.raises(UsageError, match=r"mine:score raised ValueError .* on the response 'x' to prompt row-0"):
        users(score, workers=3, seconds=30, responses="12x4")
    with pytest.raises(KeyboardInterrupt):
        users(lambda prompt, text: (_ for _ in ()).throw(KeyboardInterrupt), workers=3, seconds=30, responses="12")


def test_a_function_that_needs_signals_is_told_of_the_setting(module):
    code = "import signal\ndef score(prompt, response, answer):\n    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n"
    module(code)
    with pytest.raises(UsageError, match=r"set task\.reward_workers = 1 if it needs signals"):
        judge_responses(load_reward("my_rewards:score", FILE_PROMPTS), [answered("4")], RewardLimits(2, 30))


BATCHED = "def score(prompts, responses, answers):\n    "


def batched(module, body: str, *responses: TextResponse, seconds: float = 30):
    module("import time\n" + BATCHED + body)
    return judge_responses(load_reward("my_rewards:score", FILE_PROMPTS), responses, RewardLimits(2, seconds))


def test_a_function_of_lists_is_called_once_with_the_whole_responses(module):
    body = "assert len(prompts) == 2\n    return [float(r == a) for r, a in zip(responses, answers)]"
    judged = batched(module, body, answered("4"), answered("4", truncated=True), answered("5"))
    assert judged.rewards.tolist() == [1, 0, 0]
    assert batched(module, body, answered("4", truncated=True)).rewards.tolist() == [0]


@pytest.mark.slow
def test_a_function_of_lists_that_takes_too_long_gives_no_reward_at_all(module):
    judged = batched(module, "time.sleep(5)", answered("4"), answered("4", truncated=True), seconds=0.1)
    assert np.array_equal(judged.rewards, [math.nan, 0], equal_nan=True)
    assert judged.is_late.tolist() == [True, False]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", r"my_rewards:score returned 1 rewards for 2 responses; return one for each"),
        ("return None", r"returned no list for 2 responses"),
        ("return '12'", r"returned no list for 2 responses"),
        ("return [1.0, None]", r"returned None for the response '5' to prompt row-0, not a number"),
        ("return 3", r"raised TypeError .* on the step's 2 responses"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused(module, body, message):
    with pytest.raises(UsageError, match=message):
        batched(module, body, answered("4"), answered("5"))


def test_an_unknown_reward_is_refused_with_the_ways_there_are():
    with pytest.raises(UsageError, match=r"'maths' is unknown; give --reward math .* MODULE:FUNCTION"):
        load_reward("maths", FILE_PROMPTS)


def test_prompts_of_a_file_need_a_reward_to_be_named():
    with pytest.raises(UsageError, match="have no check of their own; give --reward math"):
        load_reward(None, FILE_PROMPTS)


@pytest.mark.parametrize(("reward", "package"), [("math", "math_verify"), (None, "reasoning_gym.factory")])
def test_a_reward_whose_package_is_missing_names_the_extra_to_install(monkeypatch, reward, package):
    monkeypatch.setitem(sys.modules, package, None)
    prompts = [Prompt("chain_sum-0", text="1+1", answer="2", task="gym:chain_sum:1:0")]
    with pytest.raises(MissingExtra, match=r"pip install 'mismatch-probe\[(math|gym)\]'"):
        load_reward(reward, prompts)
