"""Responses whose column is the sampler's bit for bit, beside others whose column was computed."""

import math
from array import array
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.logs.checks.columns import ENOUGH_TOKENS, equal_in_fp32
from mismatch_probe.records.sequences import FloatArray
from mismatch_probe.stats.sequences import is_usable

COPIED_COLUMNS: Final = ("log_pi", "log_ref")
_CERTAIN_NATS: Final = 1e-3
"""Log-probs nearer to 0 are the same on both sides without being a copy."""
_BY_CHANCE: Final = 1e-6


@dataclass
class Copies:
    """Of a column: how many telling tokens the responses have that are equal to the sampler's throughout, 4 bytes each,
    and of the other responses how many telling tokens there are and how many of these are equal.
    """

    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    others: int = 0
    others_equal: int = 0

    def add(self, values: FloatArray | None, mu: FloatArray | None) -> None:
        """Count a response by its columns over the sampled tokens [T]."""
        if values is None or mu is None:
            return
        telling, equal = _telling(mu), equal_in_fp32(values, mu)
        if equal[~np.isnan(mu)].all():
            self.lengths.append(int(telling.sum()))
        else:
            self.others += int(telling.sum())
            self.others_equal += int(equal[telling].sum())

    def __iadd__(self, other: Self) -> Self:
        self.lengths = self.lengths + other.lengths
        self.others += other.others
        self.others_equal += other.others_equal
        return self

    @property
    def fewest(self) -> int | None:
        """The fewest telling tokens that are not all equal by chance, given how many are in the other responses; None
        where too few others are there to tell. Never very few: what makes one token of a response equal, the same
        kernels on the same shapes, makes its others equal too.
        """
        if self.others < ENOUGH_TOKENS:
            return None
        share = (self.others_equal + 1) / (self.others + 2)
        return max(ENOUGH_TOKENS, math.ceil(math.log(_BY_CHANCE) / math.log(share)))

    @property
    def count(self) -> int:
        """Responses that are copies."""
        fewest = self.fewest
        return 0 if fewest is None else sum(length >= fewest for length in self.lengths)


def is_copy(values: FloatArray, mu: FloatArray, fewest: int) -> bool:
    """Whether a response's column over the sampled tokens [T] is the sampler's, on so many telling tokens or more."""
    return int(_telling(mu).sum()) >= fewest and bool(equal_in_fp32(values, mu)[~np.isnan(mu)].all())


def _telling(mu: FloatArray) -> npt.NDArray[np.bool_]:
    """Tokens that are surely below certainty."""
    return np.asarray(is_usable(mu) & (mu < -_CERTAIN_NATS))
