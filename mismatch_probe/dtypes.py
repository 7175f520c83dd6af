"""One spelling for number formats. Everything the tool writes says fp64, fp32, fp16 or bf16."""

from typing import Final, Literal, get_args

from mismatch_probe.errors import UsageError

Dtype = Literal["fp64", "fp32", "fp16", "bf16"]

DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)

TORCH_NAME: Final[dict[Dtype, str]] = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}

_ALIASES: Final[dict[str, Dtype]] = {
    **{dtype: dtype for dtype in DTYPES},
    **{name: dtype for dtype, name in TORCH_NAME.items()},
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}


def parse_dtype(text: str) -> Dtype:
    """Canonical name of a dtype given in any of the field's spellings (`bf16`, `bfloat16`, `half`, ...).

    Raises:
        UsageError: the spelling names no supported format (`auto` included: it hides what runs).
    """
    name = text.strip().lower().removeprefix("torch.")
    if name in _ALIASES:
        return _ALIASES[name]
    reason = "it hides which format runs" if name == "auto" else "it is not a format this tool can compare"
    raise UsageError(f"dtype {text!r} cannot be used: {reason}; give one of {', '.join(DTYPES)} (or vLLM's spelling)")


def vllm_name(dtype: Dtype) -> str:
    return TORCH_NAME[dtype]
