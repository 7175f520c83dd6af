"""What vLLM asks of a model's class before it starts."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, TypeVar

_Answer = TypeVar("_Answer")
_ASKS: Final = "_run_in_subprocess"


def ask_in_this_process() -> None:
    """Call before an engine is configured: the class is looked at here, where it is to run.

    vLLM looks at an architecture that is new to its cache in an interpreter of its own, which imports for ten seconds
    and leaves a temporary folder where it is killed. It does so to keep CUDA out of a process that forks its workers;
    where CUDA is there already vLLM spawns them. Versions that ask otherwise keep what they have.
    """
    registry: Any = import_module("vllm.model_executor.models.registry")
    if hasattr(registry, _ASKS):
        setattr(registry, _ASKS, _called)


def _called(look: Callable[[], _Answer]) -> _Answer:
    return look()
