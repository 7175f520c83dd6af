"""The sums from which all errors of a place follow.

A side has two errors. Its total error is its output minus the reference's; its own error is its output minus the FP32
output from this side's input. The second is what the place adds; it needs no model of how errors travel.

Pretrained models have tokens and channels of thousands of times the usual size (massive activations and attention
sinks; Sun et al., "Massive activations in large language models", 2024, section 2). In a plain sum of squares one such
number, rounded with luck, outweighs all others. So errors are relative to the size of a token or number.

A side's own errors are judged by what its format allows. Of the two numbers of a format that enclose an exact one,
rounding to nearest gives the nearer, and a directed rounding (IEEE 754-2019, section 4.3) either: both are faithful.
vLLM's kernels for CPUs without BF16 instructions round towards zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.records.activations import ErrorSums, OwnSums, SideSums

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
    bits_TC = rows_TC.contiguous().view(_INTEGERS[rows_TC.element_size()]).cpu()
    factors_C = _odd_factors(bits_TC.shape[1], seed)
    at_a_time = max(_MOST_NUMBERS // bits_TC.shape[1], 1)
    sums = [(part_TC.long() * factors_C).sum(dim=1) for part_TC in bits_TC.split(at_a_time)]
    return torch.cat(sums).numpy()


@lru_cache(maxsize=64)
def _odd_factors(width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (width,), generator=generator) * 2 + 1


_MOST_SPACINGS: Final = 1.02
"""By which a faithful number differs: sums of FP32 that end on the other side of a neighbour are let pass."""
_MAX_NUMBERS: Final = 1 << 23
"""The most logits that are computed at a time: those of many tokens take gigabytes."""


class SumsBySequence:
    """A side's outputs against a target, relative to the target token by token, summed by sequence [N] in FP64."""

    def __init__(self, num_sequences: int) -> None:
        self._sums = torch.zeros(5, num_sequences, dtype=torch.float64)
        self._largest = 0.0

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor) -> None:
        """Add a batch's tokens. Where a token's target is zero, the side's output is its error and its size."""
        error_TC = side_TC - target_TC
        target_T, side_T, error_T = (
            tensor_TC.square().sum(dim=1).double() for tensor_TC in (target_TC, side_TC, error_TC)
        )
        along_T = (error_TC * target_TC).sum(dim=1).double()
        size_T = torch.where(target_T > 0, target_T, side_T)
        size_T = torch.where(size_T > 0, size_T, torch.ones_like(size_T))
        terms = (torch.ones_like(size_T), target_T / size_T, side_T / size_T, error_T / size_T, along_T / size_T)
        for sums, term_T in zip(self._sums, terms, strict=True):
            sums.index_add_(0, sequence_T, term_T.cpu())
        largest_T = error_TC.abs().amax(dim=1).double() / (size_T / target_TC.shape[1]).sqrt()
        self._largest = max(self._largest, float(largest_T.max()))

    def finish(self) -> ErrorSums:
        tokens, target, side, error, along = (sums.numpy() for sums in self._sums)
        return ErrorSums(tokens, target, side, error, along, torch.tensor([self._largest]).double().numpy())


@dataclass(frozen=True)
class Formats:
    """A side's format at a place, and the coarser of both sides' there."""

    own: torch.dtype
    coarser: torch.dtype

    @property
    def smallest(self) -> float:
        """Normal number, below which the side's format rounds by a fixed amount."""
        return torch.finfo(self.own).smallest_normal

    def spacing(self, numbers: Tensor) -> Tensor:
        """From each number to the next larger one of its binade, in the side's format."""
        exponents = torch.frexp(numbers.abs().clamp_min(self.smallest)).exponent
        return torch.ldexp(torch.full_like(numbers, torch.finfo(self.own).eps), exponents - 1)

    def nearest_errors(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.coarser).float() - numbers

    def extra_rounding(self, numbers_TC: Tensor, weights_C: Tensor) -> Tensor:
        """What changes in a norm's output [T, C] where it also rounds its numbers before the product with its weights.

        Its mean depends on the weights: a format has few numbers, and their products with one weight may be rounded
        down more often than up. Weights are rounded in both: what that changes is luck, which channels average out.
        """
        normalised_TC = torch.where(weights_C != 0, numbers_TC / weights_C, 0)
        rounded_C = self._round(weights_C)
        return self._round(self._round(normalised_TC) * rounded_C) - self._round(normalised_TC * rounded_C)

    def _round(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.own).float()


class OwnTotals:
    """Own errors of one side at one place, relative to each number's own size and to its token's mean size.

    Rounding makes such an error about equally large in every number, and bounds each. Where a token's target is zero
    everywhere, an error is relative to itself.
    """

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._channels = torch.zeros(6, num_channels, dtype=torch.float64)
        self._sequences = torch.zeros(2, num_sequences, dtype=torch.float64)
        self._moments = torch.zeros(3, dtype=torch.float64)
        self._extra_along = 0.0
        self._extra_squares = torch.zeros(num_channels, dtype=torch.float64)
        self._tokens = 0

    def add(
        self,
        sequence_T: Tensor,
        side_TC: Tensor,
        target_TC: Tensor,
        formats: Formats,
        norm_weights_C: Tensor | None = None,
    ) -> None:
        at_a_time = max(_MAX_NUMBERS // target_TC.shape[1], 1)
        for sequence, side, target in zip(
            sequence_T.split(at_a_time), side_TC.split(at_a_time), target_TC.split(at_a_time), strict=True
        ):
            self._add(sequence, side, target, formats, norm_weights_C)
        self._tokens += len(sequence_T)

    def _add(
        self,
        sequence_T: Tensor,
        side_TC: Tensor,
        target_TC: Tensor,
        formats: Formats,
        norm_weights_C: Tensor | None,
    ) -> None:
        error_TC = side_TC - target_TC
        mean_size_T1 = target_TC.abs().mean(dim=1, keepdim=True)
        size_TC = torch.where(mean_size_T1 > 0, target_TC.hypot(mean_size_T1), error_TC.abs())
        size_TC = size_TC.clamp_min(formats.smallest)
        relative_TC, share_TC = error_TC / size_TC, target_TC / size_TC
        squares_TC, along_TC, target_squares_TC = relative_TC.square(), relative_TC * share_TC, share_TC.square()
        is_unfaithful_TC = error_TC.abs() > _MOST_SPACINGS * formats.spacing(target_TC)
        nearest_TC = (formats.nearest_errors(target_TC) / size_TC).square()
        terms = (squares_TC.square(), squares_TC * is_unfaithful_TC, nearest_TC)
        by_channel = (squares_TC, *terms, along_TC, target_squares_TC)
        for sums, term_TC in zip(self._channels, by_channel, strict=True):
            sums += term_TC.sum(dim=0).double().cpu()
        along_T, targets_T = (term_TC.sum(dim=1).double().cpu() for term_TC in (along_TC, target_squares_TC))
        for sums, term_T in zip(self._sequences, (along_T, targets_T), strict=True):
            sums.index_add_(0, sequence_T, term_T)
        self._moments += torch.stack([along_T @ along_T, along_T @ targets_T, targets_T @ targets_T])
        if norm_weights_C is not None:
            extra_TC = formats.extra_rounding(target_TC, norm_weights_C)
            self._extra_along += float((extra_TC / size_TC * share_TC).double().sum())
            extra_error_TC = (formats.nearest_errors(target_TC) + extra_TC) / size_TC
            self._extra_squares += extra_error_TC.square().sum(dim=0).double().cpu()

    def finish(self) -> OwnSums:
        squares, fourths, unfaithful, nearest, along, targets = self._channels.numpy()
        sequence_along, sequence_targets = self._sequences.numpy()
        return OwnSums(
            tokens=torch.tensor([self._tokens]).double().numpy(),
            squares=squares,
            fourths=fourths,
            unfaithful=unfaithful,
            nearest=nearest,
            along=along,
            targets=targets,
            sequence_along=sequence_along,
            sequence_targets=sequence_targets,
            token_moments=self._moments.numpy(),
            extra_along=torch.tensor([self._extra_along]).double().numpy(),
            extra_squares=self._extra_squares.numpy(),
        )


@dataclass(frozen=True)
class OwnTarget:
    """What FP32 makes of a side's own input. Only the tokens of `counted_T` count in sums by number."""

    on_input_TC: Tensor
    counted_T: Tensor
    with_parts_TC: Tensor | None = None
    """What it makes where each place inside errs as it did on that side; None where there are none inside."""
    norm_weights_C: Tensor | None = None
    """What a norm multiplies its normalised numbers by; None at another place."""


class SideTotals:
    """One side at one place, compared with the reference and with FP32 on this side's own input."""

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._total = SumsBySequence(num_sequences)
        self._own = SumsBySequence(num_sequences)
        self._own_by_number = OwnTotals(num_sequences, num_channels)
        self._between_parts = OwnTotals(num_sequences, num_channels)
        self._has_parts = False

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor, own: OwnTarget, formats: Formats) -> None:
        self._total.add(sequence_T, side_TC, target_TC)
        self._own.add(sequence_T, side_TC, own.on_input_TC)
        counted_T = own.counted_T
        counted = sequence_T[counted_T], side_TC[counted_T]
        self._own_by_number.add(*counted, own.on_input_TC[counted_T], formats, own.norm_weights_C)
        if own.with_parts_TC is not None:
            self._has_parts = True
            self._between_parts.add(*counted, own.with_parts_TC[counted_T], formats)

    def finish(self) -> SideSums:
        by_number = self._own_by_number.finish()
        between_parts = self._between_parts.finish() if self._has_parts else by_number
        return SideSums(self._total.finish(), self._own.finish(), by_number, between_parts)
