"""Forward passes of the training path over a log's responses: final hidden states, computed once for many questions."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import ExplainSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import (
    Distribution,
    chunk_of_tokens,
    log_normalisers,
    log_probs,
)
from mismatch_probe.explain.hypotheses import Context, Rope
from mismatch_probe.explain.judging import Floats, LoggedTokens
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.batching import ChunkedHead, pad_batch, plan_batches
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.precision import load_reference_model, load_training_model

_KEPT_BYTES: Final = 2**30
"""Of hidden states, after which the next are computed again when they are asked for."""


@dataclass
class LoadedWeights:
    """A model in memory, and what it makes of the log's responses in this or that context."""

    model: PreTrainedModel
    arithmetic: Arithmetic
    tokens: LoggedTokens
    batch_tokens: int
    _states: dict[tuple[str, Rope | None], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._head = ChunkedHead(self.model)

    def close(self) -> None:
        """Give the model's memory back."""
        on_gpu = self.model.device.type == "cuda"
        del self.model, self._head
        self._states.clear()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def columns(self, context: Context, rope: Rope | None, distributions: Sequence[Distribution]) -> Floats:
        """Log-probs of the responses' tokens under each distribution [K, T], in nats."""
        values = np.empty((len(distributions), len(self.tokens.rows)))
        temperatures_KT = np.stack(
            [distribution.temperatures(self.tokens.temperature) for distribution in distributions]
        )
        for chunk, logits_TV, targets_T in self.logits(context, rope):
            temperatures = torch.from_numpy(temperatures_KT[:, chunk]).to(logits_TV)
            sets = None if self.tokens.sets is None else self.tokens.sets.of(chunk)
            columns_KT = log_probs(logits_TV, targets_T, temperatures, distributions, sets)
            values[:, chunk] = columns_KT.double().cpu().numpy()
        return values

    def temperature_curve(self, context: Context, rope: Rope | None) -> tuple[Floats, Floats]:
        """What `distributions.curve` needs: the tokens' own logits [T], and normalisers [G, T]; raises as `columns`."""
        own, normalisers = [], []
        for _, logits_TV, targets_T in self.logits(context, rope):
            own.append(logits_TV.gather(-1, targets_T[:, None]).squeeze(-1).double().cpu().numpy())
            normalisers.append(log_normalisers(logits_TV).double().cpu().numpy())
        return np.concatenate(own), np.concatenate(normalisers, axis=1)

    def logits(self, context: Context, rope: Rope | None) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Chunk after chunk of tokens: which, their logits [C, V] in FP32 or wider, and the tokens themselves [C].

        Raises as `columns`.
        """
        hidden_TD = self._hidden_states(context, rope)
        targets_T = torch.from_numpy(
            np.concatenate([sequence.token_ids for sequence in self.tokens.sequences]).astype(np.int64)
        )
        size = chunk_of_tokens(self.vocab_size)
        with memory_errors_named("computing log-probs", "explain fewer responses"), self.arithmetic.active():
            for start in range(0, len(targets_T), size):
                chunk = slice(start, min(start + size, len(targets_T)))
                logits_TV = self._head.logits(hidden_TD[chunk].to(self.model.device))
                widest = torch.promote_types(logits_TV.dtype, torch.float32)
                yield chunk, logits_TV.to(widest), targets_T[chunk].to(logits_TV.device)

    def _hidden_states(self, context: Context, rope: Rope | None) -> torch.Tensor:
        """Final hidden states [T, D] before each token of the responses."""
        key = (context.name, rope)
        if key not in self._states:
            with exchanged_rope(self.model, rope):
                states_TD = self._compute_states(context)
            kept_bytes = sum(states.nbytes for states in self._states.values())
            if kept_bytes + states_TD.nbytes > _KEPT_BYTES:
                return states_TD
            self._states[key] = states_TD
        return self._states[key]

    def has_states(self, context: Context, rope: Rope | None) -> bool:
        return (context.name, rope) in self._states

    def compute_behind(self, older: "LoadedWeights", context: Context, rope: Rope | None) -> None:
        """Compute hidden states behind keys and values of the prompts that `older` computes."""
        assert context.cache is not None
        num_cached = {row: context.cache.num_cached(prompt) for row, prompt in enumerate(context.prompts)}
        with exchanged_rope(self.model, rope):
            states_of = self._states_behind(older, context.prompts, num_cached)
        self._states[context.name, rope] = torch.cat([states_of[row] for row in range(len(states_of))])

    def _states_behind(
        self, older: "LoadedWeights", prompts: Sequence[list[int]], num_cached: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """Hidden states [T, D] before the tokens of some responses, from the first one that is computed behind keys and
        values that `older` leaves of the first `num_cached[ROW]` tokens. A batch has rows of equally many such tokens.
        """
        states_of: dict[int, torch.Tensor] = {}
        body: Any = older.model.base_model
        for count in sorted(set(num_cached.values())):
            rows = [row for row, own_count in num_cached.items() if own_count == count]
            sequences = [
                TokenSequence(self.tokens.sequences[row].id, prompts[row], self.tokens.sequences[row].token_ids)
                for row in rows
            ]
            for batch in plan_batches([sequence.num_tokens for sequence in sequences], self.batch_tokens):
                padded_batch = pad_batch([sequences[number] for number in batch], vocab_size=self.vocab_size)
                ids_BS = padded_batch.input_ids_BS.to(self.model.device)
                others: dict[str, Any] = {}
                with (
                    memory_errors_named(_computing(ids_BS), "lower batch_tokens (--batch-tokens)"),
                    self.arithmetic.active(),
                ):
                    if count:
                        others["past_key_values"] = body(input_ids=ids_BS[:, :count], use_cache=True).past_key_values
                    hidden_BSD = self._head.body(ids_BS[:, count:], **others).cpu()
                for place, number in enumerate(batch):
                    sequence = sequences[number]
                    first = max(len(sequence.prompt_token_ids) - 1, count)
                    states_of[rows[number]] = hidden_BSD[place, first - count : sequence.num_tokens - 1 - count]
        return states_of

    def column_with_kept_cache(
        self, older: "LoadedWeights", context: Context, ends: Mapping[int, int], distribution: Distribution
    ) -> Floats:
        """Log-probs [T] in nats from the token `ends[ROW]` of a response on, NaN elsewhere: these weights go on where
        `older` left its keys and values, from the last token that `older` sampled.
        """
        if not ends:
            return np.full(len(self.tokens.places), np.nan)
        num_cached = {row: len(context.prompts[row]) + end - 1 for row, end in ends.items()}
        states_of = self._states_behind(older, context.prompts, num_cached)
        example = next(iter(states_of.values()))
        empty = example.new_zeros(0, example.shape[1])
        states = [
            torch.cat(
                [
                    example.new_zeros(length - len(states_of.get(row, empty)), example.shape[1]),
                    states_of.get(row, empty),
                ]
            )
            for row, length in enumerate(self.tokens.lengths.tolist())
        ]
        key = ("kept cache", None)
        self._states[key] = torch.cat(states)
        (column,) = self.columns(Context.of(key[0], context.prompts), None, [distribution])
        del self._states[key]
        starts = np.array([ends.get(row, length) for row, length in enumerate(self.tokens.lengths.tolist())])
        return np.where(self.tokens.places >= starts[self.tokens.rows], column, np.nan)

    def _compute_states(self, context: Context) -> torch.Tensor:
        sequences = [
            TokenSequence(sequence.id, prompt, sequence.token_ids)
            for sequence, prompt in zip(self.tokens.sequences, context.prompts, strict=True)
        ]
        rows: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        with self.arithmetic.active():
            for batch in plan_batches([sequence.num_tokens for sequence in sequences], self.batch_tokens):
                padded_batch = pad_batch([sequences[row] for row in batch], vocab_size=self.vocab_size)
                ids_BS = padded_batch.input_ids_BS.to(self.model.device)
                with memory_errors_named(_computing(ids_BS), "lower batch_tokens (--batch-tokens)"):
                    hidden_BSD = self._head.body(ids_BS, **_positions(context, batch, sequences, ids_BS))
                hidden_states = hidden_BSD[
                    padded_batch.rows_T.to(hidden_BSD.device), padded_batch.positions_T.to(hidden_BSD.device)
                ]
                for row, states in zip(batch, hidden_states.cpu().split(padded_batch.response_lengths), strict=True):
                    rows[row] = states
        return torch.cat(rows)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        embeddings: Any = self.model.get_input_embeddings()
        size: int = embeddings.weight.shape[0]
        return size


def _computing(ids_BS: torch.Tensor) -> str:
    return f"computing {'x'.join(map(str, ids_BS.shape))} tokens"


def _positions(
    context: Context, batch: Sequence[int], sequences: Sequence[TokenSequence], ids_BS: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Position ids where the responses' are shifted. With a mask of ones, or transformers would see packed rows."""
    if not any(context.response_shift):
        return {}
    positions_BS = torch.arange(ids_BS.shape[1]).repeat(len(batch), 1)
    for number, row in enumerate(batch):
        positions_BS[number, len(sequences[row].prompt_token_ids) :] += context.response_shift[row]
    return {
        "position_ids": positions_BS.clamp_(min=0).to(ids_BS.device),
        "attention_mask": torch.ones_like(ids_BS),
    }


@contextmanager
def exchanged_rope(model: PreTrainedModel, rope: Rope | None) -> Iterator[None]:
    """The rotary frequencies as another base or a linear scaling gives them; as before afterwards."""
    buffers = [] if rope is None else rotary_frequencies(model)
    old_values = [buffer.clone() for buffer in buffers]
    try:
        for buffer in buffers:
            assert rope is not None
            count = buffer.numel()
            exponents = torch.arange(count, dtype=torch.float64, device=buffer.device) / count
            buffer.copy_(buffer.double() * rope.base_times**-exponents / rope.positions_divided_by)
        yield
    finally:
        for buffer, values in zip(buffers, old_values, strict=True):
            buffer.copy_(values)


def rotary_frequencies(model: PreTrainedModel) -> list[torch.Tensor]:
    """The buffers of rotary frequencies [D / 2], none where the model has another kind of positions."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]


@contextmanager
def reference_weights(
    settings: ExplainSettings,
    tokens: LoggedTokens,
    *,
    checkpoint: str | None = None,
    adapter: str | None = None,
    rounded_to: Dtype | None = None,
) -> Iterator[LoadedWeights]:
    """A checkpoint in FP32 arithmetic, the declared one where none is named; its memory is given back afterwards.

    rounded_to: its weights as a side holds them in this format.
    """
    folder = Path(checkpoint or settings.model.path)
    training = _training(settings, adapter=adapter if checkpoint or adapter else settings.adapter)
    model, arithmetic, _ = load_reference_model(
        folder,
        Dtype.FP32,
        training,
        choose_device(settings.device),
        rounded_to=rounded_to,
        trust_remote_code=settings.model.trust_remote_code,
    )
    weights = LoadedWeights(model, arithmetic, tokens, settings.batch_tokens)
    del model
    try:
        yield weights
    finally:
        weights.close()


@contextmanager
def weights_in(settings: ExplainSettings, tokens: LoggedTokens, dtype: Dtype) -> Iterator[LoadedWeights]:
    """The declared checkpoint as a training path computes it in `dtype`."""
    model, arithmetic = load_training_model(
        Path(settings.model.path),
        dtype,
        _training(settings, adapter=settings.adapter),
        choose_device(settings.device),
        trust_remote_code=settings.model.trust_remote_code,
    )
    weights = LoadedWeights(model, arithmetic, tokens, settings.batch_tokens)
    del model
    try:
        yield weights
    finally:
        weights.close()


def _training(settings: ExplainSettings, *, adapter: str | None) -> TrainingPathSettings:
    return TrainingPathSettings(
        device=settings.device,
        device_map=settings.device_map,
        batch_tokens=settings.batch_tokens,
        adapter=adapter,
    )
