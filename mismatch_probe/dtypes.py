"""Number formats: one spelling, and the facts about each. Everything the tool writes says fp64, fp32, fp16 or bf16.

FP16's range [IEEE 754-2008, binary16].
"""

import math
from enum import StrEnum
from math import ldexp
from typing import Final, Self

from mismatch_probe.errors import UsageError

_FP32_SIGNIFICAND_BITS: Final = 24
_AUTOCAST_BYTES: Final = 2
_COMPUTED_BYTES: Final = (2, 4)


class Dtype(StrEnum):
    """A binary number format of IEEE 754-2019, or bfloat16, which is FP32 with a shorter significand."""

    # Pages give formats their lines in this order, from the last: a new one stands first.

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
    def safetensors_name(self) -> str:
        """What the header of a safetensors file calls it, such as F32."""
        return self.torch_name.upper().replace("FLOAT", "F")

    @property
    def num_bytes(self) -> int:
        """What a number takes in memory."""
        return (self.exponent_bits + self.significand_bits) // 8

    @property
    def rounds_coarsely(self) -> bool:
        """Whether its rounding is visible against FP32's: two right sides in it differ, by errors of its size."""
        return self.significand_bits < _FP32_SIGNIFICAND_BITS

    @property
    def can_be_reference(self) -> bool:
        """Whether errors of other formats can be measured against it."""
        return not self.rounds_coarsely

    @property
    def is_computed_in(self) -> bool:
        """Whether engines and trainers compute in it. A wider format is for a reference alone, and a narrower one only
        stores numbers.
        """
        return self.num_bytes in _COMPUTED_BYTES

    @property
    def is_autocast_target(self) -> bool:
        """Whether PyTorch's autocast casts products to it, and fused attention (flash_attention_2) takes it."""
        return self.num_bytes == _AUTOCAST_BYTES

    @property
    def round_off(self) -> float:
        """Largest relative error of one rounding to nearest."""
        return 2.0**-self.significand_bits

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return ldexp(2 - 2 * self.round_off, (1 << (self.exponent_bits - 1)) - 1)

    @property
    def least_exponent(self) -> int:
        """Of the smallest normal number, which is half of two to this power."""
        return 3 - (1 << (self.exponent_bits - 1))

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
        sides = ", ".join(dtype for dtype in cls if dtype.is_computed_in)
        others = ", ".join(dtype for dtype in cls if dtype.can_be_reference and not dtype.is_computed_in)
        raise UsageError(
            f"dtype {text!r} cannot be used: {reason}; give one of {sides}, or {others} for a reference (or vLLM's "
            "spelling)"
        )


COARSE: Final = tuple(dtype for dtype in Dtype if dtype.rounds_coarsely)
"""Formats whose rounding is visible against FP32's."""
COARSEST_FIRST: Final = sorted(COARSE, key=lambda dtype: dtype.significand_bits)
"""A number that is exact in BF16 and not too small for FP16 is exact in FP16 too."""
REFERENCE_DTYPES: Final = tuple(dtype for dtype in Dtype if dtype.can_be_reference)
"""Formats in which a reference can be computed, the finest first."""
COMPUTED_IN: Final = tuple(dtype for dtype in Dtype if dtype.is_computed_in)
"""Formats that a side can be asked to compute in."""

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
"""Half of BF16's unit roundoff, about its root mean square error: BF16 holds a number better if FP16's relative error
is larger than this.
"""


def fp16_margin_bits(largest: float) -> float | None:
    """log2(65504 / largest): how often a magnitude can double before it overflows; None for 0."""
    return math.log2(FP16_LARGEST / largest) if largest > 0 else None
