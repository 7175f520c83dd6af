"""What a response earns: a built-in task's check, an answer compared as mathematics, or a function of the user's."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import MismatchProbeError, UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks.gym import GYM_PREFIX, gym_scorer
from mismatch_probe.tasks.procedural import TASKS, verify
from mismatch_probe.tasks.prompt import Prompt
from mismatch_probe.tasks.rewards_function import import_reward
from mismatch_probe.tasks.rewards_math import math_scorer

MATH_REWARD: Final = "math"
_WAYS: Final = f"give --reward {MATH_REWARD} for answers compared as mathematics, or --reward MODULE:FUNCTION"
_LONGEST_EXCERPT: Final = 60
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True)
class Answered:
    """A response as text without special tokens; `truncated` where it was cut at the most tokens it could have."""

    prompt: EncodedPrompt
    text: str
    truncated: bool


@dataclass(frozen=True)
class Reward:
    """`score` takes a prompt and the text of a whole response, and returns what should be a number."""

    name: str
    score: Callable[[EncodedPrompt, str], Any]


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
        return Reward(name, import_reward(name))
    raise UsageError(f"reward {name!r} is unknown; {_WAYS}, or leave it out where the task checks its own answers")


def score_responses(reward: Reward, answered: Sequence[Answered]) -> npt.NDArray[np.float64]:
    """Rewards [N]. A truncated response has no final answer: it is not looked at and earns 0.

    A number that is not finite is passed on as it is, for the guards to see.

    Raises:
        UsageError: the reward raised, or returned no number.
    """
    return np.array([0.0 if answer.truncated else _score(reward, answer) for answer in answered], dtype=np.float64)


def _own_check(prompts: Sequence[Prompt]) -> Reward:
    task = prompts[0].task
    if task in TASKS:
        return Reward(task, partial(_verified, task))
    if task is not None and task.startswith(GYM_PREFIX):
        return Reward(task, gym_scorer(task))
    raise UsageError(f"prompts of a file or data set have no check of their own; {_WAYS}")


def _verified(task: str, prompt: EncodedPrompt, text: str) -> bool:
    assert prompt.answer is not None, "a built-in problem has an answer"
    return verify(task, prompt.answer, text)


def _score(reward: Reward, answered: Answered) -> float:
    try:
        value = reward.score(answered.prompt, answered.text)
    except MismatchProbeError:
        raise
    except (Exception, SystemExit) as error:  # a user's function raises what it likes
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in frames if Path(frame.filename).parent != _HERE), frames[-1])
        raise UsageError(
            f"reward {reward.name} raised {type(error).__name__} ({error}) at line {place.lineno} of {place.filename} "
            f"on {_response(answered)}; mend it"
        ) from error
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    raise UsageError(f"reward {reward.name} returned {value!r} for {_response(answered)}, not a number; return a float")


def _response(answered: Answered) -> str:
    text = answered.text
    excerpt = text if len(text) <= _LONGEST_EXCERPT else text[:_LONGEST_EXCERPT] + "..."
    return f"the response {excerpt!r} to prompt {answered.prompt.prompt_id}"
