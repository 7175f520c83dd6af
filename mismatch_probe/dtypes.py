"""Number formats: one spelling, and the facts about each. Everything the tool writes says fp64, fp32, fp16 or bf16.

FP16's range [IEEE 754-2008, binary16].
"""

import math
from enum import StrEnum
from math import ldexp
from typing import Final, Self

from mismatch_probe.errors import UsageError


class Dtype(StrEnum):
    """A binary number format of IEEE 754-2019, or bfloat16, which is FP32 with a shorter significand."""

    torch_name: str
    """vLLM's too."""
    exponent_bits: int
    significand_bits: int
    """The hidden bit included."""

    FP64 = "fp64", "float64", 11, 53
    FP32 = "fp32", "float32", 8, 24
    FP16 = "fp16", "float16", 5, 11
    BF16 = "bf16", "bfloat16", 8, 8

    def __new__(cls, name: str, torch_name: str, exponent_bits: int, significand_bits: int) -> Self:
        dtype = str.__new__(cls, name)
        dtype._value_ = name
        dtype.torch_name = torch_name
        dtype.exponent_bits, dtype.significand_bits = exponent_bits, significand_bits
        return dtype

    @property
    def num_bytes(self) -> int:
        return (self.exponent_bits + self.significand_bits) // 8

    @property
    def is_16_bit(self) -> bool:
        return self.num_bytes == 2

    @property
    def round_off(self) -> float:
        """Largest relative error of one rounding to nearest."""
        return 2.0**-self.significand_bits

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return ldexp(2 - 2 * self.round_off, (1 << (self.exponent_bits - 1)) - 1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The format that any of the field's spellings names (`bf16`, `bfloat16`, `torch.half`, ...).

        Raises:
            UsageError: the spelling names no supported format (`auto` included: it hides what runs).
        """
        name = short_name(text.strip().lower())
        for dtype in cls:
            if dtype == name:
                return dtype
        if name == "auto":
            reason = "it hides which format runs"
        elif name.lstrip("mxnv").startswith(("fp8", "float8", "fp4", "int8", "int4")):
            reason = "nothing computes in it alone; quantization and kv_cache_dtype of an engine put it beside a dtype"
        else:
            reason = "it is not a format this tool can compare"
        raise UsageError(f"dtype {text!r} cannot be used: {reason}; give one of {', '.join(cls)} (or vLLM's spelling)")


SIXTEEN_BIT: Final = tuple(dtype for dtype in Dtype if dtype.is_16_bit)

_SHORT_NAMES: Final = {
    **{dtype.torch_name: dtype.value for dtype in Dtype},
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}


def short_name(name: object) -> str:
    """The tool's name of a format that PyTorch names, or is; any other name as it is."""
    text = str(name).removeprefix("torch.")
    return _SHORT_NAMES.get(text, text)


def side_label(name: str) -> str:
    """A format in capitals, another name of a side as it was given."""
    return name.upper() if name in tuple(Dtype) else name


def sides_label(train: str, infer: str) -> str:
    """`BF16`, or `train FP32 / infer BF16` where the two sides differ."""
    return side_label(train) if train == infer else f"train {side_label(train)} / infer {side_label(infer)}"


FP16_LARGEST: Final = Dtype.FP16.largest
FP16_ROUNDS_TO_INFINITY: Final = 65520.0
"""The smallest magnitude that rounds to infinity: half a unit in the last place above the largest."""
FP16_SMALLEST_NORMAL_EXPONENT: Final = -14
FP16_FLUSHED_EXPONENT: Final = -25
"""Magnitudes up to this power of two round to zero (ties to even): half of the smallest subnormal, 2^-24."""

FP16_LOSSY: Final = 2.0**-9
"""Half of BF16's unit roundoff, about its root mean square: what FP16 holds with a larger relative error is held better
by BF16.
"""


def fp16_margin_bits(largest: float) -> float | None:
    """log2(65504 / largest): how often a magnitude can double before it overflows; None for 0."""
    return math.log2(FP16_LARGEST / largest) if largest > 0 else None
