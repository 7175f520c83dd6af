"""Which tokens' numbers were seen before, bit for bit: rounding drew nothing new in them."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_NUMBERS: Final = 2**22
"""In memory at a time, as integers of 8 bytes."""


class RowsSeen:
    """Remembers the rows of one place by a hash of 64 bits each: equal rows have equal ones."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, dtype=np.int64)

    def are_new(self, tensors: Sequence[Tensor]) -> Tensor:
        """Whether a row is the first of its kind [T]; `tensors` [T, ...] have the same rows."""
        hashes = np.zeros(len(tensors[0]), dtype=np.int64)
        for number, tensor in enumerate(tensors):
            hashes += _hash_rows(tensor.flatten(start_dim=1), seed=number)
        is_new = np.zeros(len(hashes), dtype=np.bool_)
        distinct, first_rows = np.unique(hashes, return_index=True)
        is_new[first_rows] = ~np.isin(distinct, self._hashes)
        self._hashes = np.concatenate([self._hashes, hashes[is_new]])
        return torch.from_numpy(is_new)


def _hash_rows(rows_TC: Tensor, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each row's bits times random odd integers, added modulo 2^64 (multilinear hashing; Lemire and Kaser, 2014)."""
    generator = torch.Generator().manual_seed(seed)
    bits_TC = rows_TC.contiguous().view(_INTEGERS[rows_TC.element_size()]).cpu()
    factors_C = torch.randint(-(2**62), 2**62, (bits_TC.shape[1],), generator=generator) * 2 + 1
    at_a_time = max(_MOST_NUMBERS // bits_TC.shape[1], 1)
    sums = [(part_TC.long() * factors_C).sum(dim=1) for part_TC in bits_TC.split(at_a_time)]
    return torch.cat(sums).numpy()
