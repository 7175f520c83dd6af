"""Checkpoints that see or hear too: vLLM computes the text part alone, and needs nothing of what prepares images."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from mismatch_probe.errors import StartRefused, said

_TEXT_ALONE: Final = "language_model_only"
_LIMITS: Final = "limit_mm_per_prompt"
TEXT_PART_ARGS: Final = frozenset({_TEXT_ALONE, _LIMITS})
_IMAGES: Final = "torchvision"
_PARTS: Final = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops")


def text_part_defaults(
    config: Any, text_config: Any, args: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """What has vLLM leave out the parts that prompts of text never reach; nothing where the user said what is left.

    config: the checkpoint's, of which `text_config` is a part, or the same where it knows text alone. known: the
    engine's arguments.
    """
    if text_config is config or _TEXT_ALONE in args or _LIMITS in args:
        return {}
    return {_TEXT_ALONE: True} if _TEXT_ALONE in known else {_LIMITS: {"image": 0, "video": 0}}


def import_model_file(config: Any, text_config: Any) -> None:
    """Import vLLM's file of an architecture that sees or hears too, as vLLM is about to.

    The file imports what prepares images, which wants torchvision: a stand-in takes its place where it is not
    installed, as in vLLM's CPU build, since nothing of it is called for text.

    Raises:
        StartRefused: the file cannot be imported, with the reason, which vLLM itself only writes to its log.
    """
    if text_config is config:
        return
    registry: Any = import_module("vllm.model_executor.models.registry")
    for name in getattr(config, "architectures", None) or ():
        model = registry.ModelRegistry.models.get(name)
        if model is None or not hasattr(model, "load_model_cls"):
            continue
        try:
            with _stand_in():
                model.load_model_cls()
        except ImportError as error:
            raise StartRefused(
                f"vLLM cannot load its model file of {name} ({said(error)}); install that package beside vLLM, or take "
                "another checkpoint"
            ) from error


@contextmanager
def _stand_in() -> Iterator[None]:
    """Where torchvision is missing, it can be imported within, and everything in it is an empty class."""
    import_module("transformers.utils").is_torchvision_available()  # the answer is kept: it is not there
    if find_spec(_IMAGES) is not None:
        yield
        return
    names = [_IMAGES, *(f"{_IMAGES}.{part}" for part in _PARTS)]
    for name in names:
        sys.modules[name] = _Nothing(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class _Nothing(ModuleType):
    """A package in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", type(name, (), {}))
