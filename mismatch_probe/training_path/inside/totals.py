"""Sums over tokens from which every error is made: by sequence for intervals, by channel for single rows."""

import torch
from torch import Tensor

from mismatch_probe.records.place_errors import ErrorSums, SideSums


class SumsBySequence:
    """A side's outputs against a target, summed over the tokens of each sequence [N] in FP64."""

    def __init__(self, num_sequences: int) -> None:
        self._sums = torch.zeros(5, num_sequences, dtype=torch.float64)
        self._largest = 0.0

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor) -> Tensor:
        """Add a batch's tokens; the error [T, C]."""
        error_TC = side_TC - target_TC
        terms = (torch.ones_like(target_TC[:, :1]), target_TC**2, side_TC**2, error_TC**2, error_TC * target_TC)
        for sums, term_TC in zip(self._sums, terms, strict=True):
            sums.index_add_(0, sequence_T, term_TC.sum(dim=1).double().cpu())
        self._largest = max(self._largest, float(error_TC.abs().max()))
        return error_TC

    def done(self) -> ErrorSums:
        tokens, target, side, error, along = (sums.numpy() for sums in self._sums)
        return ErrorSums(tokens, target, side, error, along, torch.tensor([self._largest]).double().numpy())


class SideTotals:
    """One side at one place: against the reference, and against FP32 on what this side itself was given."""

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._total = SumsBySequence(num_sequences)
        self._own = SumsBySequence(num_sequences)
        self._channels = torch.zeros(3, num_channels, dtype=torch.float64)
        self._channel_tokens = 0

    def add(
        self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor, own_target_TC: Tensor, by_channel_T: Tensor
    ) -> None:
        """Only the tokens of `by_channel_T` count by channel."""
        self._total.add(sequence_T, side_TC, target_TC)
        own_error_TC = self._own.add(sequence_T, side_TC, own_target_TC)
        squares_TC = own_target_TC[by_channel_T] ** 2
        for sums, term_TC in zip(
            self._channels, (own_error_TC[by_channel_T] ** 2, squares_TC, squares_TC**2), strict=True
        ):
            sums += term_TC.sum(dim=0).double().cpu()
        self._channel_tokens += int(by_channel_T.sum())

    def done(self) -> SideSums:
        own, target, fourths = self._channels.numpy()
        tokens = torch.tensor([self._channel_tokens]).double().numpy()
        return SideSums(self._total.done(), self._own.done(), own, target, fourths, tokens)


def routers_differ(first_TE: Tensor, second_TE: Tensor, top_k: int) -> Tensor:
    """Whether the sets of the `top_k` largest router logits differ [T]."""
    first, second = (
        torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, logits_TE.topk(top_k).indices, True)
        for logits_TE in (first_TE, second_TE)
    )
    return (first != second).any(dim=1)
