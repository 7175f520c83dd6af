"""Sums over tokens from which every error is made: by sequence for intervals, by channel for single rows."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sums:
    """What is summed over the tokens of each sequence [N], FP64.

    error is a side's output less what it is held against; `along` is its product with the latter.
    """

    tokens: Tensor
    target_squares: Tensor
    side_squares: Tensor
    error_squares: Tensor
    along: Tensor
    largest: float = 0.0

    @classmethod
    def zeros(cls, num_sequences: int) -> "Sums":
        tokens, target, side, error, along = torch.zeros(5, num_sequences, dtype=torch.float64)
        return cls(tokens, target, side, error, along)

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor) -> Tensor:
        """Add a batch's tokens, FP32; the error [T, C]."""
        error_TC = side_TC - target_TC
        self.tokens.index_add_(0, sequence_T, torch.ones_like(sequence_T, dtype=torch.float64))
        for sums, terms_TC in (
            (self.target_squares, target_TC.square()),
            (self.side_squares, side_TC.square()),
            (self.error_squares, error_TC.square()),
            (self.along, error_TC * target_TC),
        ):
            sums.index_add_(0, sequence_T, terms_TC.sum(dim=1).double().cpu())
        self.largest = max(self.largest, float(error_TC.abs().max()))
        return error_TC


@dataclass
class SideTotals:
    """One side at one place: against the reference, and against FP32 on what this side itself was given."""

    total: Sums
    own: Sums
    own_channels: Tensor | None = None
    target_channels: Tensor | None = None

    def add_channels(self, own_error_TC: Tensor, target_TC: Tensor) -> None:
        own_C, target_C = (terms.square().sum(dim=0).double().cpu() for terms in (own_error_TC, target_TC))
        if self.own_channels is None or self.target_channels is None:
            self.own_channels, self.target_channels = own_C, target_C
        else:
            self.own_channels += own_C
            self.target_channels += target_C


@dataclass
class RouterTotals:
    """Tokens [N] of each sequence whose set of experts differs, by what is set against what."""

    tokens: Tensor
    differing: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, sequence_T: Tensor, differs_T: Tensor) -> None:
        sums = self.differing.setdefault(name, torch.zeros_like(self.tokens))
        sums.index_add_(0, sequence_T, differs_T.double().cpu())


def other_experts(first_TE: Tensor, second_TE: Tensor, top_k: int) -> Tensor:
    """Whether the sets of the `top_k` largest router logits differ [T]."""
    sets = [
        torch.zeros_like(one, dtype=torch.bool).scatter(1, one.topk(top_k).indices, True)
        for one in (first_TE, second_TE)
    ]
    return (sets[0] != sets[1]).any(dim=1)
