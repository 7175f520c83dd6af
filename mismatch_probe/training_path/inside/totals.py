"""Sums over tokens from which every error is made. No single token or number decides one: each counts by its own size.

Pretrained models have tokens and channels of thousands of times the usual size (massive activations and attention
sinks; Sun et al., "Massive activations in large language models", 2024, section 2). In a plain sum of squares one such
number, rounded with luck, outweighs all others.
"""

from typing import Final

import torch
from torch import Tensor

from mismatch_probe.records.place_errors import ErrorSums, OwnSums, SideSums

_MAX_NUMBERS: Final = 1 << 23
"""That are computed at a time: logits of many tokens are gigabytes."""


class SumsBySequence:
    """A side's outputs against a target, relative to the target token by token, summed by sequence [N] in FP64."""

    def __init__(self, num_sequences: int) -> None:
        self._sums = torch.zeros(5, num_sequences, dtype=torch.float64)
        self._largest = 0.0

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor) -> None:
        """Add a batch's tokens. A token whose target is zero is held against the side: all that it gives is error."""
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

    def done(self) -> ErrorSums:
        tokens, target, side, error, along = (sums.numpy() for sums in self._sums)
        return ErrorSums(tokens, target, side, error, along, torch.tensor([self._largest]).double().numpy())


class OwnTotals:
    """Own errors of one side at one place, each in units of its number's size: of its own, and its token's mean size.

    Rounding makes such an error about as large in every number, and bounds it in each. Where a token's target is zero
    everywhere, an error is held against itself.
    """

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._channels = torch.zeros(4, num_channels, dtype=torch.float64)
        self._sequences = torch.zeros(2, num_sequences, dtype=torch.float64)
        self._moments = torch.zeros(3, dtype=torch.float64)
        self._tokens = 0

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor, smallest: float) -> None:
        """`smallest` is the side's smallest normal number, below which its format rounds by a fixed amount."""
        at_a_time = max(_MAX_NUMBERS // target_TC.shape[1], 1)
        for sequence, side, target in zip(
            sequence_T.split(at_a_time), side_TC.split(at_a_time), target_TC.split(at_a_time), strict=True
        ):
            self._add(sequence, side, target, smallest)
        self._tokens += len(sequence_T)

    def _add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor, smallest: float) -> None:
        error_TC = side_TC - target_TC
        mean_size_T1 = target_TC.abs().mean(dim=1, keepdim=True)
        size_TC = torch.where(mean_size_T1 > 0, target_TC.hypot(mean_size_T1), error_TC.abs()).clamp_min(smallest)
        relative_TC, share_TC = error_TC / size_TC, target_TC / size_TC
        squares_TC, along_TC, target_squares_TC = relative_TC.square(), relative_TC * share_TC, share_TC.square()
        by_channel = (squares_TC, squares_TC.square(), along_TC, target_squares_TC)
        for sums, term_TC in zip(self._channels, by_channel, strict=True):
            sums += term_TC.sum(dim=0).double().cpu()
        along_T, targets_T = (term_TC.sum(dim=1).double().cpu() for term_TC in (along_TC, target_squares_TC))
        for sums, term_T in zip(self._sequences, (along_T, targets_T), strict=True):
            sums.index_add_(0, sequence_T, term_T)
        self._moments += torch.stack([along_T @ along_T, along_T @ targets_T, targets_T @ targets_T])

    def done(self) -> OwnSums:
        squares, fourths, along, targets = self._channels.numpy()
        sequence_along, sequence_targets = self._sequences.numpy()
        return OwnSums(
            tokens=torch.tensor([self._tokens]).double().numpy(),
            squares=squares,
            fourths=fourths,
            along=along,
            targets=targets,
            sequence_along=sequence_along,
            sequence_targets=sequence_targets,
            token_moments=self._moments.numpy(),
        )


class SideTotals:
    """One side at one place: against the reference, and against FP32 on what this side itself was given."""

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._total = SumsBySequence(num_sequences)
        self._own = SumsBySequence(num_sequences)
        self._own_by_number = OwnTotals(num_sequences, num_channels)

    def add(
        self,
        sequence_T: Tensor,
        side_TC: Tensor,
        target_TC: Tensor,
        own_target_TC: Tensor,
        counted_T: Tensor,
        smallest: float,
    ) -> None:
        """Only the tokens of `counted_T` count in sums by number."""
        self._total.add(sequence_T, side_TC, target_TC)
        self._own.add(sequence_T, side_TC, own_target_TC)
        self._own_by_number.add(sequence_T[counted_T], side_TC[counted_T], own_target_TC[counted_T], smallest)

    def done(self) -> SideSums:
        return SideSums(self._total.done(), self._own.done(), self._own_by_number.done())


def routers_differ(first_TE: Tensor, second_TE: Tensor, top_k: int) -> Tensor:
    """Whether the sets of the `top_k` largest router logits differ [T]."""
    first, second = (
        torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, logits_TE.topk(top_k).indices, True)
        for logits_TE in (first_TE, second_TE)
    )
    return (first != second).any(dim=1)
