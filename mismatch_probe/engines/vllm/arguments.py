"""From `--vllm.KEY VALUE` to engine arguments: spelling checked, values parsed, what the probe decides kept its own."""

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.reading import Unreadable, parse_json

_DECIDED_ELSEWHERE: Final[dict[str, str]] = {
    "model": "it is set by --model",
    "dtype": "it is set by --dtype or --infer-dtype",
    "revision": "it is set by --revision",
    "trust_remote_code": "it is set by --trust-remote-code",
    "seed": "it is set by --seed",
    "enable_prefix_caching": "it is set by engine.prefix_caching in the configuration",
    "logprobs_mode": "the probabilities compared are those sampled from, so it stays processed_logprobs",
    "max_logprobs": "whole distributions are asked for, so it stays unlimited",
    "generation_config": "a checkpoint's sampling defaults must not slip in, so it stays 'vllm'",
    "worker_extension_cls": "the probe puts its own extension there",
    "hf_token": "a run directory keeps its command line, so a secret belongs into the environment (HF_TOKEN)",
    "skip_tokenizer_init": "token texts need the tokenizer",
}
_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
}
_COUNTS: Final = frozenset(
    {
        "block_size",
        "data_parallel_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    }
)
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "none": None}


@cache
def known_arguments() -> dict[str, str]:
    """Every engine argument of the installed vLLM with its type as text, read from its source.

    Importing vLLM takes seconds and changes the process that does it.

    Raises:
        EngineError: this vLLM declares its arguments elsewhere.
    """
    package = find_spec("vllm")
    assert package is not None, "required before"
    assert package.origin is not None
    path = Path(package.origin).parent / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        declared = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    except (OSError, StopIteration) as error:
        raise EngineError(
            f"the installed vLLM declares no EngineArgs in {path}; install a version that mismatch-probe supports"
        ) from error
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in declared.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def engine_arguments(given: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """`given` with canonical names and parsed values, ready to be keyword arguments of `vllm.LLM`.

    Raises:
        UsageError: an argument is not among the `known` ones, is given twice, is one the probe decides, or has a value
            of another type than vLLM's.
    """
    parsed: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix("--").removeprefix("vllm.").replace("-", "_")
        if name in _DECIDED_ELSEWHERE:
            raise UsageError(f"--vllm.{name} cannot be given: {_DECIDED_ELSEWHERE[name]}")
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(f'--vllm.{match}' for match in near)}?" if near else ""
            raise UsageError(f"vLLM has no argument {name!r}, given as --vllm.{key}{hint}")
        if name in parsed:
            raise UsageError(f"--vllm.{name} is given twice")
        kind = known[name].removesuffix(" | None")
        parsed[name] = parse_value(value, is_text=kind == "str")
        if kind in _KINDS and not _fits(parsed[name], known[name]):
            raise UsageError(f"--vllm.{name} takes {_KINDS[kind][1]}, not {value!r}")
        if name in _COUNTS and parsed[name] is not None and parsed[name] < 1:
            raise UsageError(f"--vllm.{name} {parsed[name]} cannot be used; give at least 1")
    return parsed


def _fits(value: Any, known: str) -> bool:
    kind, _, optional = known.partition(" | ")
    if value is None:
        return bool(optional)
    types, _ = _KINDS[kind]
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def parse_value(value: Any, *, is_text: bool = False) -> Any:
    """A command line's string as the JSON value it spells, else the string itself; other types unchanged.

    `is_text` keeps a string that looks like a number, for arguments that are text.
    """
    if not isinstance(value, str):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if is_text:
        return value
    try:
        return parse_json(value)
    except Unreadable:
        return value
