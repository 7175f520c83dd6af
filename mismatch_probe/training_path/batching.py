"""Which sequences share a forward pass, and how they are laid out in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil
from typing import Final, TypeVar

import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence

Row = TypeVar("Row")

_SHORTEST_SHARE: Final = 0.75
PAD_ID: Final = 0


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of each batch, longest sequences first, from the lengths alone.

    A batch's padded size, rows x longest, stays within `batch_tokens` (a longer sequence has a batch of its own), and
    its shortest row is at least three quarters of its longest, so at most a quarter of the work is padding.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        fits = batches and (len(batches[-1]) + 1) * longest <= batch_tokens and length >= _SHORTEST_SHARE * longest
        if fits:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = length
    return batches


def plan_passes(
    lengths: Sequence[int], pass_tokens: int, num_streams: int, alone_beyond: int | None = None
) -> list[list[int]]:
    """The passes of a batch that so many streams share: batches of `plan_batches`, of about as many rows each.

    Where rows suffice each stream has as many passes as the others, so that none waits long for the last. A row with
    more inputs than `alone_beyond`, all its tokens but the last, has a pass of its own.
    """
    alone = [row for row, length in enumerate(lengths) if alone_beyond is not None and length - 1 > alone_beyond]
    if alone:
        others = [row for row in range(len(lengths)) if row not in set(alone)]
        together = plan_passes([lengths[row] for row in others], pass_tokens, num_streams)
        return [*([row] for row in alone), *([others[place] for place in rows] for rows in together)]
    passes: list[list[int]] = []
    for alike in plan_batches(lengths, len(lengths) * max(lengths, default=0)):
        most_rows = max(1, pass_tokens // max(lengths[alike[0]], 1))
        rounds = ceil(len(alike) / (most_rows * num_streams))
        num_passes = min(len(alike), rounds * num_streams)
        ends = [number * len(alike) // num_passes for number in range(num_passes + 1)]
        passes += [alike[start:end] for start, end in pairwise(ends)]
    return passes


def in_order(passes: Sequence[Sequence[int]], of_passes: Sequence[Sequence[Row]]) -> list[Row]:
    """What the passes of a batch give for their rows, in the order of the batch."""
    of_row = dict(zip(chain.from_iterable(passes), chain.from_iterable(of_passes), strict=True))
    return [of_row[row] for row in range(len(of_row))]


@dataclass(frozen=True)
class PaddedBatch:
    """Right-padded inputs [B, S] and, for each response token in order, where its distribution is computed.

    `rows_T` and `positions_T` point at the hidden state that predicts `targets_T`; `response_lengths` has one entry a
    row. The last token of a row predicts nothing that is asked for and is left out of the inputs.
    """

    input_ids_BS: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor
    targets_T: torch.Tensor
    response_lengths: list[int]


def pad_batch(batch: Sequence[TokenSequence], *, vocab_size: int, pad_id: int = PAD_ID) -> PaddedBatch:
    """Lay out a batch on the host.

    Raises:
        UsageError: a sequence has no prompt token, so nothing predicts its first response token, or an id that the
            model has no embedding for.
    """
    for sequence in batch:
        require_scorable(sequence, vocab_size)
    width = max(max(sequence.num_tokens - 1, 1) for sequence in batch)
    input_ids_BS = torch.full((len(batch), width), pad_id, dtype=torch.long)
    rows, positions, targets = [], [], []
    for row, sequence in enumerate(batch):
        inputs = (sequence.prompt_token_ids + sequence.token_ids)[:width]
        input_ids_BS[row, : len(inputs)] = torch.tensor(inputs, dtype=torch.long)
        num_prompt, num_response = len(sequence.prompt_token_ids), len(sequence.token_ids)
        rows.append(torch.full((num_response,), row, dtype=torch.long))
        positions.append(torch.arange(num_prompt - 1, num_prompt - 1 + num_response))
        targets.append(torch.tensor(sequence.token_ids, dtype=torch.long))
    return PaddedBatch(
        input_ids_BS,
        torch.cat(rows),
        torch.cat(positions),
        torch.cat(targets),
        [len(sequence.token_ids) for sequence in batch],
    )


def require_scorable(sequence: TokenSequence, vocab_size: int) -> None:
    """
    Raises:
        UsageError: as `pad_batch`.
    """
    if not sequence.prompt_token_ids:
        raise UsageError(
            f"sequence {sequence.id} has no prompt token, so nothing predicts its first response token; "
            "give every prompt at least one token"
        )
    ids = sequence.prompt_token_ids + sequence.token_ids
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise UsageError(
            f"sequence {sequence.id} holds a token id outside the model's {vocab_size} embeddings; "
            "score it with the checkpoint whose tokenizer made it"
        )
