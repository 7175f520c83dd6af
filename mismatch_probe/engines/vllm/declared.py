"""The engine arguments that the installed vLLM declares, read from its source, and whether it compiles.

Importing vLLM takes seconds and changes the process that does it.
"""

import ast
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mismatch_probe.engines.vllm.memory import KV_SIZE_ARGS
from mismatch_probe.engines.vllm.text_part import TEXT_PART_ARGS
from mismatch_probe.errors import INSTALL_ENGINES, EngineError, MissingExtra

COMPILATION_ARGS: Final = (
    "enforce_eager",
    "compilation_config",
    "optimization_level",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
)


def compilation_defaults(args: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Engine arguments for a user who says nothing of compilation: eager on a CPU, vLLM's own choice elsewhere.

    Measured on a CPU: compiling takes 12 to 32 s a start, and 512 responses take 5.0 s compiled and 4.7 s eagerly.
    """
    if not on_cpu or any(name in args for name in COMPILATION_ARGS):
        return {}
    return {"enforce_eager": True}


def prepare_compilation(*, on_cpu: bool) -> None:
    """Let a second start on a CPU load what the first one compiled; what is compiled ahead of time cannot be loaded."""
    if on_cpu:
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


_LEFT_OPEN_IS_CHOSEN: Final = frozenset(
    {
        *COMPILATION_ARGS,
        *KV_SIZE_ARGS,
        *TEXT_PART_ARGS,
        "distributed_executor_backend",
        "max_model_len",
        "max_num_batched_tokens",
    }
)
"""What the probe chooses where it is not given: to give vLLM's default says something."""


@cache
def known_arguments() -> dict[str, str]:
    """Every engine argument with its type as text.

    Raises:
        MissingExtra: vLLM is not installed.
        EngineError: this vLLM declares its arguments elsewhere.
    """
    return {name: ast.unparse(node.annotation) for name, node in _declarations()}


@cache
def default_arguments() -> dict[str, Any]:
    """The defaults that stand in the source as plain values, of arguments that say nothing where they have them.

    Raises as `known_arguments`.
    """
    fields, defaults = _config_fields(), {}
    for name, node in _declarations():
        if name in _LEFT_OPEN_IS_CHOSEN or node.value is None:
            continue
        value = fields.get(ast.unparse(node.value), node.value)
        with suppress(ValueError):
            defaults[name] = ast.literal_eval(value)
    return defaults


def _declarations() -> list[tuple[str, ast.AnnAssign]]:
    path = _package() / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        declared = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    except (OSError, StopIteration) as error:
        raise EngineError(
            f"the installed vLLM declares no EngineArgs in {path}; install a version that mismatch-probe supports"
        ) from error
    return list(_fields(declared))


def _config_fields() -> dict[str, ast.expr]:
    """What the classes of vLLM's configuration give their fields, by `Class.field`, as `EngineArgs` refers to them."""
    values = {}
    for path in sorted((_package() / "config").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for name, field in _fields(node):
                    if field.value is not None:
                        values[f"{node.name}.{name}"] = _default(field.value)
    return values


def _default(value: ast.expr) -> ast.expr:
    """The default in `Field(default=1, ge=1)`; a value itself elsewhere."""
    if isinstance(value, ast.Call):
        return next((word.value for word in value.keywords if word.arg == "default"), value)
    return value


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id, field


def _package() -> Path:
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise MissingExtra(f"vLLM is not installed, and its arguments are read from it; run {INSTALL_ENGINES}")
    return Path(package.origin).parent
