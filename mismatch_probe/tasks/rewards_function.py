"""Rewards that the user writes: `module:function`, imported and called in the process that asks."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import EncodedPrompt

SIGNATURE = "def {name}(prompt: str, response: str, answer: str | None) -> float"
BATCHED = "def {name}(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]"
_OF_ONE: Final = ("prompt", "response", "answer")
_OF_ALL: Final = ("prompts", "responses", "answers")


@dataclass(frozen=True)
class UsersReward:
    """A function of the user's, whose arguments say whether it takes one response or several at once."""

    function: Callable[..., Any]
    is_batched: bool

    def of_one(self, prompt: EncodedPrompt, text: str) -> Any:
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
    wanted = SIGNATURE.format(name=function_name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"reward {name} is no plain function; write {wanted}")
    try:
        parameters = inspect.signature(function)
        if _takes(parameters, _OF_ALL):
            return UsersReward(function, is_batched=True)
        parameters.bind(**dict.fromkeys(_OF_ONE))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"reward {name} cannot be called with prompt, response and answer ({error}); write {wanted}, or "
            f"{BATCHED.format(name=function_name)} for all of a step's responses at once"
        ) from error
    return UsersReward(function, is_batched=False)


def _takes(parameters: inspect.Signature, names: Sequence[str]) -> bool:
    """Whether it has arguments of these names."""
    return set(names) <= parameters.parameters.keys()


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
            f"{place.filename} as it was imported; mend it"
        ) from error
    if hasattr(module, function_name):
        return getattr(module, function_name)
    near = get_close_matches(function_name, vars(module), n=1)
    meant = f"; did you mean {module_name}:{near[0]}?" if near else f"; write {SIGNATURE.format(name=function_name)}"
    raise UsageError(f"reward {name}: {module.__file__} has no {function_name!r}{meant}")


def _parents(module_name: str) -> list[str]:
    """`a.b.c`, `a.b` and `a`."""
    parts = module_name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
