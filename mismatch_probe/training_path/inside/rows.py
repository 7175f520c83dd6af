"""Between a padded pass and rows of tokens: a row [C] a token, the sequences of a batch one after another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.records.activations import ActivationBatch


@dataclass(frozen=True)
class Layout:
    """Where each row stands in a right-padded pass [B, S]."""

    rows_T: Tensor
    columns_T: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, batch: ActivationBatch, device: torch.device) -> "Layout":
        counts = batch.rows_per_sequence
        rows_T = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        columns_T = torch.cat([torch.arange(count) for count in counts])
        return cls(rows_T.to(device), columns_T.to(device), (len(counts), max(counts)))

    def fits(self, padded: Tensor) -> bool:
        """Whether a tensor has a row for each token of the pass."""
        rows, width = self.shape
        return tuple(padded.shape[:2]) == self.shape or (padded.dim() == 2 and padded.shape[0] == rows * width)

    def pack(self, padded: Tensor) -> Tensor:
        """Rows [T, C] of [B, S, ...] or of what a module has flattened to [B * S, C]."""
        return self._batched(padded)[self.rows_T.to(padded.device), self.columns_T.to(padded.device)].flatten(1)

    def unpack(self, rows_TC: Tensor, like: Tensor) -> Tensor:
        """Rows in the shape, dtype and device of `like`; zero in the padding."""
        padded = torch.zeros_like(like, memory_format=torch.contiguous_format)
        batched = self._batched(padded)
        at = self.rows_T.to(like.device), self.columns_T.to(like.device)
        batched[at] = rows_TC.to(like.device, like.dtype).view(-1, *batched.shape[2:])
        return padded

    def _batched(self, tensor: Tensor) -> Tensor:
        """A view [B, S, ...]."""
        return tensor if tuple(tensor.shape[:2]) == self.shape else tensor.view(*self.shape, *tensor.shape[1:])
