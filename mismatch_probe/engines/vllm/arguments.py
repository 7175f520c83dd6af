"""From `--vllm.KEY VALUE` to engine arguments: spelling checked, values parsed, what the probe decides kept its own."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from mismatch_probe.engines.vllm.declared import default_arguments, known_arguments
from mismatch_probe.errors import UsageError
from mismatch_probe.reading import Unreadable, parse_json

__all__ = ["default_arguments", "engine_arguments", "known_arguments"]

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
    "enable_lora": "it is set by engine.adapter, the folder of the adapter to serve",
    "max_loras": "one adapter is served, that of engine.adapter",
    "lora_target_modules": "they follow from engine.adapter",
    "max_lora_rank": "it follows from engine.adapter",
    "hf_token": "a run directory keeps its command line, so a secret belongs into the environment (HF_TOKEN)",
    "skip_tokenizer_init": "token texts need the tokenizer",
}
_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((float,), "a number"),
    "str": ((str,), "text"),
}
_CONTAINERS: Final = ("list", "dict", "set", "tuple")
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
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "none": None, "null": None}


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
            given_as = "" if key == name else f", given as --vllm.{key}"
            raise UsageError(f"vLLM has no argument {name!r}{given_as}{hint}")
        if name in parsed:
            raise UsageError(f"--vllm.{name} is given twice")
        parsed[name] = _typed(name, value, known[name])
        if name in _COUNTS and parsed[name] is not None and parsed[name] < 1:
            raise UsageError(f"--vllm.{name} {parsed[name]} cannot be used; give at least 1")
    return parsed


def _typed(name: str, value: Any, declared: str) -> Any:
    """`value` in the type that vLLM declares; of types with names of their own vLLM itself is the judge."""
    kinds = declared.strip("'\"").split(" | ")
    types = [kind for kind in kinds if kind != "None"]
    typed = _read(value, types, is_optional="None" in kinds) if isinstance(value, str) else value
    if "float" in types and "int" not in types and isinstance(typed, int) and not isinstance(typed, bool):
        typed = float(typed)
    if (typed is None and "None" in kinds) or not all(kind in _KINDS for kind in types):
        return typed
    if not any(_is_of(typed, kind) for kind in types):
        raise UsageError(f"--vllm.{name} takes {' or '.join(_KINDS[kind][1] for kind in types)}, not {value!r}")
    return typed


def _read(text: str, types: list[str], *, is_optional: bool) -> Any:
    """What `text` spells: text itself for an argument that is text, unless it is written as a list or a table."""
    word = _WORDS.get(text.lower(), text)
    if word is None:
        return None if is_optional else text
    is_text = any(kind == "str" or kind.startswith("Literal[") for kind in types)
    if isinstance(word, bool) and ("bool" in types or not is_text):
        return word
    is_container = text.startswith(("[", "{")) and any(kind.startswith(_CONTAINERS) for kind in types)
    if is_text and not is_container:
        return text
    try:
        return parse_json(text)
    except Unreadable:
        return text


def _is_of(value: Any, kind: str) -> bool:
    types, _ = _KINDS[kind]
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))
