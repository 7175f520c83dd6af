"""Rewards that the user writes: `module:function`, imported and called in the user's own process."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import EncodedPrompt

SIGNATURE = "def {name}(prompt: str, response: str, answer: str | None) -> float"


def import_reward(name: str) -> Callable[[EncodedPrompt, str], Any]:
    """The function that `module:function` names, which is called with `prompt`, `response` and `answer` by keyword.

    `prompt` is the text that the model saw, its chat template included; `response` the text of a whole response without
    special tokens; `answer` what the prompt's row holds under `answer`, or None. Modules of the working directory are
    found first.

    Raises:
        UsageError: the module or the function is not there, the module raises, or these arguments do not fit.
    """
    module_name, _, function_name = name.partition(":")
    function = _find(name, module_name, function_name)
    wanted = SIGNATURE.format(name=function_name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"reward {name} is no plain function; write {wanted}")
    try:
        inspect.signature(function).bind(prompt="", response="", answer=None)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"reward {name} cannot be called with prompt, response and answer ({error}); write {wanted}"
        ) from error

    def score(prompt: EncodedPrompt, text: str) -> Any:
        return function(prompt=prompt.text, response=text, answer=prompt.answer)

    return score


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
