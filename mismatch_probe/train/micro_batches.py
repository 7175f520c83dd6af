"""Which responses share a forward pass on which rank, and what the passes gave, put together again."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gathered, largest, rank, world_size
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.training_path.batching import plan_batches


@dataclass(frozen=True)
class MicroBatch:
    """Responses of one forward pass; a filler is computed for nothing, by a rank that has fewer."""

    rows: list[int]
    is_filler: bool = False

    def of(self, rollouts: Sequence[Rollout]) -> list[TokenSequence]:
        return [rollouts[row].sequence for row in self.rows]


def micro_batches(rollouts: Sequence[Rollout], rows: Sequence[int], most_tokens: int) -> list[MicroBatch]:
    """This rank's share of `rows`; as many on every rank, because each forward pass gathers weights from all."""
    own = list(rows)[rank() :: world_size()]
    lengths = [rollouts[row].sequence.num_tokens for row in own]
    fits_in_one = lengths and len(lengths) * max(lengths) <= most_tokens
    planned = [list(range(len(own)))] if fits_in_one else plan_batches(lengths, most_tokens)
    batches = [MicroBatch([own[index] for index in batch]) for batch in planned]
    return batches + [MicroBatch([0], is_filler=True)] * (int(largest(len(batches))) - len(batches))


def gathered_tokens(
    rollouts: Sequence[Rollout], batches: Sequence[MicroBatch], passes: Sequence[torch.Tensor]
) -> Floats:
    """What each micro-batch of each rank gave for its response tokens, for all tokens [T] on every rank."""
    own: list[tuple[int, Floats]] = []
    for batch, values_T in zip(batches, passes, strict=True):
        ends = np.cumsum([rollouts[row].length for row in batch.rows])[:-1]
        if not batch.is_filler:
            own += zip(batch.rows, np.split(values_T.detach().double().cpu().numpy(), ends), strict=True)
    by_row = dict(gathered(own))
    return np.concatenate([by_row[row] for row in range(len(rollouts))])
