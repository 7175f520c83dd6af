r"""What a response earns: a built-in task's check, an answer compared as mathematics, or a function of the user's.

A function of the user's, `module:function`, is imported and called in the process that asks. Answers are compared as
mathematics by math-verify (`1/2` is `\frac{1}{2}` is `0.5`), which is installed on request. Rewards are asked for again
to see whether the function repeats itself, and whether each reward belongs to its response.
"""

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import MismatchProbeError, MissingExtra, UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.tasks.problems import GYM_PREFIX, TASKS, Prompt, gym_scorer, verify
from mismatch_probe.tasks.reward_calls import SEQUENTIAL, RewardLimits, make_calls

SIGNATURE = "def {name}(prompt: str, response: str, answer: str | None) -> float"
BATCHED = "def {name}(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]"
_SINGLE_ARGUMENTS: Final = ("prompt", "response", "answer")
_OF_ALL: Final = ("prompts", "responses", "answers")


@dataclass(frozen=True)
class UsersReward:
    """A function of the user's, whose arguments say whether it takes one response or several at once."""

    function: Callable[..., Any]
    is_batched: bool

    def call_single(self, prompt: EncodedPrompt, text: str) -> Any:
        return self.function(prompt=prompt.text, response=text, answer=prompt.answer)

    def of_all(self, prompts: Sequence[EncodedPrompt], texts: Sequence[str]) -> Any:
        return self.function(
            prompts=[prompt.text for prompt in prompts],
            responses=list(texts),
            answers=[prompt.answer for prompt in prompts],
        )


def import_reward(name: str) -> UsersReward:
    """The function that `module:function` names, which is called with `prompt`, `response` and `answer` by keyword.

    `prompt` is the text that the model saw, its chat template included; `response` the text of a whole response without
    special tokens; `answer` what the prompt's row holds under `answer`, or None. One that takes `prompts`, `responses`
    and `answers` is called with lists of them. Modules of the working directory are found first.

    Raises:
        UsageError: the module or the function is not there, the module raises, or these arguments do not fit.
    """
    module_name, _, function_name = name.partition(":")
    function = _find(name, module_name, function_name)
    signature = SIGNATURE.format(name=function_name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"reward {name} is no plain function; write {signature}")
    try:
        parameters = inspect.signature(function)
        if set(_OF_ALL) <= parameters.parameters.keys():
            return UsersReward(function, is_batched=True)
        parameters.bind(**dict.fromkeys(_SINGLE_ARGUMENTS))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"reward {name} cannot be called with prompt, response and answer ({error}); write {signature}, or "
            f"{BATCHED.format(name=function_name)} for all of a step's responses at once"
        ) from error
    return UsersReward(function, is_batched=False)


def _find(name: str, module_name: str, function_name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module runs what it likes
        missing = isinstance(error, ModuleNotFoundError) and error.name in _parents(module_name)
        if missing or not module_name:
            raise UsageError(
                f"reward {name}: there is no module {module_name!r} in {folder} or in the environment; run where "
                "it lies, or put its folder on PYTHONPATH"
            ) from error
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"reward {name}: module {module_name} raised {type(error).__name__} ({error}) at line {place.lineno} of "
            f"{place.filename} as it was imported; fix it"
        ) from error
    if hasattr(module, function_name):
        return getattr(module, function_name)
    close_names = get_close_matches(function_name, vars(module), n=1)
    suggestion = (
        f"; did you mean {module_name}:{close_names[0]}?"
        if close_names
        else f"; write {SIGNATURE.format(name=function_name)}"
    )
    raise UsageError(f"reward {name}: {module.__file__} has no {function_name!r}{suggestion}")


def _parents(module_name: str) -> list[str]:
    """`a.b.c`, `a.b` and `a`."""
    parts = module_name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def math_scorer(prompts: Sequence[Prompt]) -> Callable[[EncodedPrompt, str], bool]:
    """Whether a response's last formula or number equals its prompt's answer.

    An answer without `$` or `\\boxed` is read as a formula.

    Raises:
        MissingExtra: math-verify is not installed.
        UsageError: a prompt has no answer; later, in scoring, one that math-verify cannot read.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtra(
            "reward math needs the package math-verify, which is not installed; "
            "run `pip install 'mismatch-probe[math]'`"
        ) from error
    ids_without_answer = [prompt.prompt_id for prompt in prompts if not (prompt.answer or "").strip()]
    if ids_without_answer:
        raise UsageError(
            f"reward math compares with answers, and {len(ids_without_answer)} of {len(prompts)} prompts have none, "
            f"{ids_without_answer[0]} the first; give every row an answer column, or another --reward"
        )

    @cache
    def gold(answer: str) -> list[Any]:
        has_marks = "$" in answer or "\\boxed" in answer
        return list(parse(answer if has_marks else f"${answer}$"))

    def score(prompt: EncodedPrompt, text: str) -> bool:
        assert prompt.answer is not None
        gold_answer = gold(prompt.answer)
        if not gold_answer:
            raise UsageError(f"math-verify can read no answer in {prompt.answer!r} of prompt {prompt.prompt_id}")
        return bool(verify(gold_answer, parse(text)))

    return score


MATH_REWARD: Final = "math"
_WAYS: Final = f"give --reward {MATH_REWARD} for answers compared as mathematics, or --reward MODULE:FUNCTION"
_LONGEST_EXCERPT: Final = 60
_FOLDER: Final = Path(__file__).parent


@dataclass(frozen=True)
class TextResponse:
    """A response as text without special tokens; `truncated` where it was cut at the most tokens it could have."""

    prompt: EncodedPrompt
    text: str
    truncated: bool


@dataclass(frozen=True)
class Reward:
    """`score` takes a prompt and the text of a whole response, and returns what should be a number."""

    name: str
    score: Callable[[EncodedPrompt, str], Any]
    score_all: Callable[[Sequence[EncodedPrompt], Sequence[str]], Any] | None = None
    """In its place, takes all of a step's and returns a sequence of these."""
    is_users: bool = False
    """May run in threads, and may take longer than it should."""


@dataclass(frozen=True)
class JudgedResponses:
    """Rewards [N]; NaN where `is_late` [N] says that the reward took longer than it may."""

    rewards: npt.NDArray[np.float64]
    is_late: npt.NDArray[np.bool_]


def load_reward(name: str | None, prompts: Sequence[Prompt]) -> Reward:
    """The reward for responses to these prompts.

    None is the check of the task that the prompts come from (built-in, or reasoning-gym's); `math` compares with the
    prompt's answer through math-verify; `module:function` is imported from the working directory or the environment.

    Raises:
        UsageError: no such reward, prompts without what it needs, or a function that cannot be imported or called.
        MissingExtra: it needs a package that is not installed.
    """
    if name is None:
        return _own_check(prompts)
    if name == MATH_REWARD:
        return Reward(name, math_scorer(prompts))
    if ":" in name:
        own = import_reward(name)
        return Reward(name, own.call_single, own.of_all if own.is_batched else None, is_users=True)
    raise UsageError(f"reward {name!r} is unknown; {_WAYS}, or leave it out where the task checks its own answers")


def score_responses(reward: Reward, answers: Sequence[TextResponse]) -> npt.NDArray[np.float64]:
    """Rewards [N], one response after another however long that takes; else as `judge_responses`."""
    return judge_responses(reward, answers, SEQUENTIAL).rewards


def judge_responses(reward: Reward, answers: Sequence[TextResponse], limits: RewardLimits) -> JudgedResponses:
    """What responses earn. A truncated one has no final answer: it is not looked at and earns 0.

    A number that is not finite is passed on as it is, for the guards to see. The limits are for a function of the
    user's.

    Raises:
        UsageError: the reward raised, or returned no number.
    """
    complete = [row for row, answer in enumerate(answers) if not answer.truncated]
    works: list[Callable[[], list[float]]]
    if reward.score_all is None:
        works = [partial(_score, reward, answers[row]) for row in complete]
    else:
        works = [partial(_score_all, reward, [answers[row] for row in complete])] if complete else []
    calls = make_calls(works, limits if reward.is_users else SEQUENTIAL)
    is_late, rewards = np.zeros(len(answers), dtype=bool), np.zeros(len(answers))
    for call, rows in zip(calls, [[row] for row in complete] if reward.score_all is None else [complete], strict=False):
        is_late[rows] = call.is_late
        rewards[rows] = np.nan if call.is_late else call.value
    return JudgedResponses(rewards, is_late)


def _own_check(prompts: Sequence[Prompt]) -> Reward:
    task = prompts[0].task
    if task in TASKS:
        return Reward(task, partial(_verify, task))
    if task is not None and task.startswith(GYM_PREFIX):
        return Reward(task, gym_scorer(task))
    raise UsageError(f"prompts of a file or data set have no check of their own; {_WAYS}")


def _verify(task: str, prompt: EncodedPrompt, text: str) -> bool:
    assert prompt.answer is not None, "a built-in problem has an answer"
    return verify(task, prompt.answer, text)


def _score(reward: Reward, answer: TextResponse) -> list[float]:
    with _raised_by(reward, f"on {_response(answer)}"):
        value = reward.score(answer.prompt, answer.text)
    return [_number(reward, answer, value)]


def _score_all(reward: Reward, answers: Sequence[TextResponse]) -> list[float]:
    assert reward.score_all is not None
    with _raised_by(reward, f"on the step's {len(answers)} responses"):
        values = reward.score_all([item.prompt for item in answers], [item.text for item in answers])
        values = None if values is None or isinstance(values, (str, bytes)) else list(values)
    if values is None or len(values) != len(answers):
        what = "no list" if values is None else f"{len(values)} rewards"
        raise UsageError(f"reward {reward.name} returned {what} for {len(answers)} responses; return one for each")
    return [_number(reward, item, value) for item, value in zip(answers, values, strict=True)]


@contextmanager
def _raised_by(reward: Reward, argument: str) -> Iterator[None]:
    """
    Raises:
        UsageError: what a user's function raises, whatever it is, with its place.
    """
    try:
        yield
    except MismatchProbeError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in frames if Path(frame.filename).parent != _FOLDER), frames[-1])
        signals = "; set task.reward_workers = 1 if it needs signals" if "main thread" in str(error) else ""
        raise UsageError(
            f"reward {reward.name} raised {type(error).__name__} ({error}) at line {place.lineno} of {place.filename} "
            f"{argument}; fix it{signals}"
        ) from error


def _number(reward: Reward, answer: TextResponse, value: Any) -> float:
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    raise UsageError(f"reward {reward.name} returned {value!r} for {_response(answer)}, not a number; return a float")


def _response(answer: TextResponse) -> str:
    text = answer.text
    excerpt = text if len(text) <= _LONGEST_EXCERPT else text[:_LONGEST_EXCERPT] + "..."
    return f"the response {excerpt!r} to prompt {answer.prompt.prompt_id}"


_SAME: Final = 1e-6
"""Relative difference of two rewards that count as one."""
_SAME_OF_SPREAD: Final = 0.1
"""The same in standard deviations of a step's rewards: a reward model rounds otherwise among other responses."""


@dataclass(frozen=True)
class Repeats:
    """Counts of responses whose reward was asked for again.

    with_second, with_first: of these, those whose third answer is the second one again, or the first. A function that
    judges by chance gives its three answers in any order, so the two counts are equal in expectation, however often it
    changes its mind. A reward that is of another response is never given again. Both are 0 of a function of lists,
    whose answers may depend on the other responses of a list.
    """

    differ: int = 0
    """The second answer is another than the first."""
    with_second: int = 0
    with_first: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "reward/unrepeated": float(self.differ),
            "reward/mispaired": float(self.with_second - self.with_first),
            "reward/mispaired_error": math.sqrt(self.with_second + self.with_first),
        }


def ask_again(
    reward: Reward, answers: Sequence[TextResponse], first: Floats, spread: float, limits: RewardLimits
) -> Repeats:
    """Of whole responses and what they earned [N], which may be NaN; a third time where the second answer differs. An
    answer that comes too late is not counted. spread: standard deviation of the step's rewards.
    """
    second = judge_responses(reward, answers, limits)
    bearable = _SAME_OF_SPREAD * spread
    differ = np.flatnonzero(~_same(first, second.rewards, bearable) & ~second.is_late)
    if not differ.size or reward.score_all is not None:
        return Repeats(differ.size)
    third = judge_responses(reward, [answers[row] for row in differ], limits)
    with_second = _same(second.rewards[differ], third.rewards, bearable) & ~third.is_late
    with_first = _same(first[differ], third.rewards, bearable) & ~third.is_late
    return Repeats(differ.size, int(with_second.sum()), int(with_first.sum()))


def _same(first: Floats, other: Floats, bearable: float) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = np.isclose(first, other, rtol=_SAME, atol=bearable, equal_nan=True)
    return same
