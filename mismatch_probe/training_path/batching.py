"""Batches of sequences: the plan, the padded inputs, the model's head on chunks, and the scores of each token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil
from typing import Any, Final, TypeVar

import torch
from transformers import PreTrainedModel

from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence

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
    """The passes into which so many streams divide a batch of `plan_batches`, each of about as many rows.

    With enough rows each stream has as many passes as the others, so that none waits long for the last. A row with more
    inputs (all its tokens but the last) than `alone_beyond` has a pass of its own.
    """
    long_rows = [row for row, length in enumerate(lengths) if alone_beyond is not None and length - 1 > alone_beyond]
    if long_rows:
        others = [row for row in range(len(lengths)) if row not in set(long_rows)]
        short_passes = plan_passes([lengths[row] for row in others], pass_tokens, num_streams)
        return [*([row] for row in long_rows), *([others[place] for place in rows] for rows in short_passes)]
    passes: list[list[int]] = []
    for alike in plan_batches(lengths, len(lengths) * max(lengths, default=0)):
        most_rows = max(1, pass_tokens // max(lengths[alike[0]], 1))
        rounds = ceil(len(alike) / (most_rows * num_streams))
        num_passes = min(len(alike), rounds * num_streams)
        ends = [number * len(alike) // num_passes for number in range(num_passes + 1)]
        passes += [alike[start:end] for start, end in pairwise(ends)]
    return passes


def in_order(passes: Sequence[Sequence[int]], of_passes: Sequence[Sequence[Row]]) -> list[Row]:
    """The results of the passes for their rows, in the order of the batch."""
    of_row = dict(zip(chain.from_iterable(passes), chain.from_iterable(of_passes), strict=True))
    return [of_row[row] for row in range(len(of_row))]


@dataclass(frozen=True)
class PaddedBatch:
    """Right-padded inputs [B, S] and, for each response token in order, where its distribution is computed.

    `rows_T` and `positions_T` point at the hidden state that predicts `targets_T`; `response_lengths` has one entry a
    row. The last token of a row predicts nothing that is scored and is absent from the inputs.
    """

    input_ids_BS: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor
    targets_T: torch.Tensor
    response_lengths: list[int]


def pad_batch(batch: Sequence[TokenSequence], *, vocab_size: int, pad_id: int = PAD_ID) -> PaddedBatch:
    """Lay out a batch on the host."""
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
            f"response {sequence.id} holds a token id outside the model's {vocab_size} embeddings; "
            "give --model the checkpoint whose tokenizer made it"
        )


class ChunkedHead:
    """Splits a causal LM's forward into its body, which runs once, and its head, which runs on chunks of tokens.

    Both halves call the model's own forward with the base model's forward exchanged. So whatever the model does to its
    logits (soft caps, scales), and hooks around it (FSDP, accelerate), happens as in one pass. Only one chunk has the
    size [tokens, vocabulary].
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            EngineError: the model has no body apart from its head.
        """
        self._model = model
        self._base: torch.nn.Module = model.base_model
        self._body_outputs: Any = None
        if self._base is model:
            raise EngineError(
                f"{type(model).__name__} has no base model apart from its head, so its log-probs cannot be computed "
                "in chunks; use a causal language model of transformers"
            )

    def body(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        """Final hidden states [B, S, D] of ids [B, S]; `others` are further arguments of the model's forward."""
        base_forward = self._base.forward
        hidden_states: list[torch.Tensor] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = base_forward(*args, **kwargs)
            hidden_states.append(outputs.last_hidden_state)
            outputs.last_hidden_state = outputs.last_hidden_state[:, :1]
            self._body_outputs = outputs
            return outputs

        with forward_exchanged(self._base, forward):
            self._model(input_ids=input_ids, use_cache=False, **others)
        return hidden_states[0]

    @property
    def last_hidden(self) -> torch.Tensor:
        """Some of the hidden states [1, T, D] of the last call."""
        hidden_1TD: torch.Tensor = self._body_outputs.last_hidden_state
        return hidden_1TD

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of some hidden states, with the model's own scales and caps."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._body_outputs.last_hidden_state = hidden_TD[None]
            return self._body_outputs

        with forward_exchanged(self._base, forward):
            input_ids = torch.zeros((1, 1), dtype=torch.long, device=self._model.device)
            logits_1TV: torch.Tensor = self._model(input_ids=input_ids, use_cache=False).logits
        return logits_1TV[0]


@contextmanager
def forward_exchanged(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Exchange the module's forward inside the block."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


_CHUNK_BYTES: Final = 128 * 2**20
_BLOCK_LOGITS: Final = 2**20
"""Of a CPU's thread, which its cache holds."""


@dataclass(frozen=True)
class TokenScores:
    """Per token [T]: its log-prob (nats), the arg-max token in its place, the entropy of its distribution (nats)."""

    logprobs_T: torch.Tensor
    top1_ids_T: torch.Tensor
    entropy_nats_T: torch.Tensor

    def by_sequence(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        """The scores of each response, from those of all responses' tokens in a row."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        return [
            ScoredSequence(sequence.id, logprobs.numpy(), top1_ids.numpy(), entropy.numpy())
            for sequence, logprobs, top1_ids, entropy in zip(
                sequences,
                self.logprobs_T.cpu().split(lengths),
                self.top1_ids_T.int().cpu().split(lengths),
                self.entropy_nats_T.cpu().split(lengths),
                strict=True,
            )
        ]


def score_logits(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, *, temperature: float, log_softmax_dtype: torch.dtype
) -> TokenScores:
    """Scores under softmax(logits / temperature), with division and log-softmax in `log_softmax_dtype`.

    Results are FP32, or FP64 where that is the log-softmax's format. Non-finite logits give non-finite log-probs; a
    logit of minus infinity is a token of probability 0 and adds nothing to the entropy.
    """
    result_dtype = torch.promote_types(log_softmax_dtype, torch.float32)
    scaled_TV = _at_temperature(logits_TV, temperature, log_softmax_dtype)
    top1_ids_T = scaled_TV.argmax(dim=-1)
    log_softmax_TV = torch.log_softmax(scaled_TV, dim=-1).to(result_dtype)
    logprobs_T = log_softmax_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    probabilities_TV = log_softmax_TV.exp()
    log_softmax_TV.clamp_(min=torch.finfo(result_dtype).min)
    entropy_nats_T = -probabilities_TV.mul_(log_softmax_TV).sum(dim=-1)
    return TokenScores(logprobs_T, top1_ids_T, entropy_nats_T)


def log_distributions(logits_TV: torch.Tensor, *, temperature: float, log_softmax_dtype: torch.dtype) -> torch.Tensor:
    """Log-probs of every token of the vocabulary [T, V], computed as in `score_logits`."""
    result_dtype = torch.promote_types(log_softmax_dtype, torch.float32)
    return torch.log_softmax(_at_temperature(logits_TV, temperature, log_softmax_dtype), dim=-1).to(result_dtype)


def _at_temperature(logits_TV: torch.Tensor, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    scaled_TV = logits_TV.to(dtype)
    return scaled_TV if temperature == 1 else scaled_TV / temperature


def score_hidden_states(
    head: ChunkedHead,
    hidden_TD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    log_softmax_dtype: torch.dtype,
) -> TokenScores:
    """`score_logits` in chunks of tokens whose logits and temporaries stay within _CHUNK_BYTES.

    On a CPU a chunk's logits are scored in blocks: a product is the faster the more tokens it has, and what is computed
    of its logits the fewer. The blocks change no number. Another size of chunks may change the last bits of products
    in FP32 and FP64, whose sums a kernel orders by the number of tokens.
    """
    result_dtype = torch.promote_types(log_softmax_dtype, torch.float32)
    logits_bytes, scores_bytes = 3 * vocab_size * hidden_TD.dtype.itemsize, 4 * vocab_size * result_dtype.itemsize
    chunk_tokens = block_tokens = max(1, _CHUNK_BYTES // (logits_bytes + scores_bytes))
    if hidden_TD.device.type == "cpu":
        block_tokens = min(block_tokens, max(1, _BLOCK_LOGITS // vocab_size) * torch.get_num_threads())
        chunk_tokens = max(block_tokens, (_CHUNK_BYTES - block_tokens * scores_bytes) // logits_bytes)
    # What outlives a chunk would pin the heap around its freed temporaries, so results are filled in place.
    scores = TokenScores(
        torch.empty_like(targets_T, dtype=result_dtype),
        torch.empty_like(targets_T),
        torch.empty_like(targets_T, dtype=result_dtype),
    )

    def score(logits_TV: torch.Tensor, block: slice) -> None:
        targets = targets_T[block].to(logits_TV.device)
        block_scores = score_logits(logits_TV, targets, temperature=temperature, log_softmax_dtype=log_softmax_dtype)
        scores.logprobs_T[block] = block_scores.logprobs_T
        scores.top1_ids_T[block] = block_scores.top1_ids_T
        scores.entropy_nats_T[block] = block_scores.entropy_nats_T

    for chunk in _slices(0, len(targets_T), chunk_tokens):
        logits_TV = head.logits(hidden_TD[chunk])
        for block in _slices(chunk.start, chunk.stop, block_tokens):
            score(logits_TV[block.start - chunk.start : block.stop - chunk.start], block)
        del logits_TV
    return scores


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))
