"""Sequences that begin alike, laid out so that every state is computed once.

In a causal model the state at a position follows from the tokens up to it. So one forward pass over the distinct
prefixes of a batch, above all the prompt that samples share, gives the same as a pass over all sequences. Attention
alone needs complete sequences.

For it queries, keys and values of the distinct states are copied to the rows of their sequences (`shared_attention`).
PyTorch's fused attention runs on these rows as it would without sharing, and each state takes its output from its first
row. A state's keys and values have gradients from every row that contains them; these are added up in FP32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.batching import PaddedBatch, pad_batch


@dataclass(frozen=True)
class SharedPrefixes:
    """The places of the U states of a flat input in the sequences of attention.

    `states_RS` has a row for each sequence that is no prefix of another, padded on the right with state 0. `places_U`
    is the first place of each state in it, row after row.
    """

    states_RS: torch.Tensor
    places_U: torch.Tensor


@dataclass(frozen=True)
class StateBatch:
    """Inputs of a forward pass, and the state that predicts each token.

    A question is a state and the next token: `states_Q` are positions of the inputs row after row, `targets_Q` are ids,
    and `questions_T` is the question of each response token, in order. Where `prefixes` is set the inputs are one row
    of states, each behind its prefix.
    """

    input_ids_BS: torch.Tensor
    position_ids_BS: torch.Tensor | None
    prefixes: SharedPrefixes | None
    states_Q: torch.Tensor
    targets_Q: torch.Tensor
    questions_T: torch.Tensor

    @classmethod
    def padded(cls, batch: PaddedBatch) -> Self:
        """Every sequence in a row of its own, every token a question of its own."""
        states_T = batch.rows_T * batch.input_ids_BS.shape[1] + batch.positions_T
        return cls(batch.input_ids_BS, None, None, states_T, batch.targets_T, torch.arange(len(states_T)))

    def model_inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments of the model's forward.

        Without a mask of ones transformers would infer packed sequences from the positions, where there are none.
        """
        input_ids_BS = self.input_ids_BS.to(device)
        if self.prefixes is None or self.position_ids_BS is None:
            return {"input_ids": input_ids_BS}
        states_RS, places_U = self.prefixes.states_RS.to(device), self.prefixes.places_U.to(device)
        return {
            "input_ids": input_ids_BS,
            "position_ids": self.position_ids_BS.to(device),
            "attention_mask": torch.ones_like(input_ids_BS),
            "prefixes": SharedPrefixes(states_RS, places_U),
        }


def share_prefixes(batch: Sequence[TokenSequence]) -> StateBatch:
    """Lay out every distinct prefix of the batch once. Sequences need a prompt token and ids of the vocabulary."""
    inputs = [np.array((sequence.prompt_token_ids + sequence.token_ids)[:-1], dtype=np.int64) for sequence in batch]
    states: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(batch)
    ids, positions = [], []
    rows: list[int] = []
    num_states, last = 0, -1
    for index in sorted(range(len(batch)), key=lambda index: inputs[index].tolist()):
        num_common = 0 if last < 0 else _num_shared(inputs[last], inputs[index])
        own = len(inputs[index]) - num_common
        states[index] = np.concatenate([states[last][:num_common], np.arange(num_states, num_states + own)])
        ids.append(inputs[index][num_common:])
        positions.append(np.arange(num_common, num_common + own))
        if last >= 0 and num_common == len(inputs[last]):
            rows.pop()
        rows.append(index)
        num_states, last = num_states + own, index
    asked_T = np.concatenate([states[row][len(sequence.prompt_token_ids) - 1 :] for row, sequence in enumerate(batch)])
    targets_T = np.concatenate([np.array(sequence.token_ids, dtype=np.int64) for sequence in batch])
    asked_QP, questions_T = np.unique(np.stack([asked_T, targets_T], axis=1), axis=0, return_inverse=True)
    return StateBatch(
        torch.from_numpy(np.concatenate(ids))[None],
        torch.from_numpy(np.concatenate(positions))[None],
        _shared_prefixes([states[row] for row in rows], num_states),
        torch.from_numpy(asked_QP[:, 0].copy()),
        torch.from_numpy(asked_QP[:, 1].copy()),
        torch.from_numpy(questions_T.reshape(-1)),
    )


def _num_shared(ids: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(ids), len(other))
    differs = np.flatnonzero(ids[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _shared_prefixes(rows: list[np.ndarray], num_states: int) -> SharedPrefixes:
    width = max(len(row) for row in rows)
    states_RS = np.zeros((len(rows), width), dtype=np.int64)
    places_U = np.empty(num_states, dtype=np.int64)
    for number, row in reversed(list(enumerate(rows))):
        states_RS[number, : len(row)] = row
        places_U[row] = number * width + np.arange(len(row))
    return SharedPrefixes(torch.from_numpy(states_RS), torch.from_numpy(places_U))


SHARED_ATTENTION: Final = "sdpa_of_shared_prefixes"
_TOLERANCE: Final = 1e-3
"""The tolerance relative to the largest state, in FP32; a model that mixes tokens outside attention differs by 1."""
_PROBES: Final = ([3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 2], [3, 1, 4, 8, 2, 8], [2, 7, 1], [3, 1, 4, 1, 5])


class _Mask:
    """A mask that is made once the length of the sequences is available.

    It is no dataclass and has no model config: FSDP copies such arguments for every layer.
    """

    def __init__(self, *, config: object = None, **arguments: Any) -> None:
        self._arguments = arguments

    def of(self, length: int) -> torch.Tensor | None:
        """Boolean [1, 1, S, S], or None for plain causal attention."""
        sizes = {"batch_size": 1, "q_length": length, "kv_length": length, "attention_mask": None}
        return sdpa_mask(**{**self._arguments, **sizes})


class _Rows(torch.autograd.Function):
    """Values [U, ...] of states at their places in rows [R * S, ...]."""

    @staticmethod
    def forward(ctx: Any, values_UX: torch.Tensor, states_RS: torch.Tensor) -> torch.Tensor:
        ctx.states_P, ctx.num_states = states_RS.flatten(), len(values_UX)
        return values_UX.index_select(0, ctx.states_P)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_PX,) = gradients
        added_UX = torch.ops.aten.embedding_dense_backward(
            gradient_PX.flatten(1).float(), ctx.states_P, ctx.num_states, -1, False
        )
        return added_UX.to(gradient_PX.dtype).view(-1, *gradient_PX.shape[1:]), None


class _FirstPlaces(torch.autograd.Function):
    """Values [U, ...] of states from their first places among rows [R * S, ...]."""

    @staticmethod
    def forward(ctx: Any, values_PX: torch.Tensor, places_U: torch.Tensor) -> torch.Tensor:
        ctx.places_U, ctx.num_places = places_U, len(values_PX)
        return values_PX.index_select(0, places_U)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_UX,) = gradients
        spread_PX = gradient_UX.new_zeros(ctx.num_places, *gradient_UX.shape[1:])
        return spread_PX.index_copy_(0, ctx.places_U, gradient_UX), None


def shared_attention(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    attention_mask: _Mask | None,
    prefixes: SharedPrefixes | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [B, S, H, D]: of the states [1, U, H, D] of `prefixes`, or of plain rows without it."""
    if prefixes is None:
        mask = None if attention_mask is None else attention_mask.of(query_BHSD.shape[2])
        return sdpa_attention_forward(module, query_BHSD, key_BHSD, value_BHSD, mask, **kwargs)
    states_RS = prefixes.states_RS
    length = states_RS.shape[1]
    rows = [
        _Rows.apply(values_1HUD[0].transpose(0, 1), states_RS).unflatten(0, (-1, length)).transpose(1, 2)
        for values_1HUD in (query_BHSD, key_BHSD, value_BHSD)
    ]
    mask = None if attention_mask is None else attention_mask.of(length)
    output_RSHD, _ = sdpa_attention_forward(module, rows[0], rows[1], rows[2], mask, **kwargs)
    return _FirstPlaces.apply(output_RSHD.flatten(0, 1), prefixes.places_U)[None], None


def can_share_prefixes(model: PreTrainedModel) -> bool:
    """Make a model on the host ready for shared prefixes, if it has SDPA attention and computes the same with them.

    A trial on a few tokens shows this, in the format of the model's parameters; a model that cannot take them raises
    and stays unchanged. A model that scales attention by a token's place in the inputs and not by its position does so
    only far behind these tokens, so its config shows it.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or getattr(config, "attn_temperature_tuning", False):
        return False
    sequences = [TokenSequence("probe", ids[:2], ids[2:]) for ids in _PROBES]
    embeddings: Any = model.get_input_embeddings()
    padded_batch = StateBatch.padded(pad_batch(sequences, vocab_size=embeddings.weight.shape[0]))
    with torch.no_grad():
        expected_TD = _states_before_tokens(model, padded_batch)
        try:
            model.set_attn_implementation(SHARED_ATTENTION)
            shared_TD = _states_before_tokens(model, share_prefixes(sequences))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            shared_TD = torch.full_like(expected_TD, torch.nan)
    scale = expected_TD.abs().max()
    shares = bool(((shared_TD - expected_TD).abs() <= _TOLERANCE * scale).all())
    if not shares:
        model.set_attn_implementation("sdpa")
    return shares


def _states_before_tokens(model: PreTrainedModel, batch: StateBatch) -> torch.Tensor:
    """The state before each response token [T, D]."""
    body: Callable[..., Any] = model.base_model
    hidden_BSD: torch.Tensor = body(**batch.model_inputs(model.device), use_cache=False).last_hidden_state
    return hidden_BSD.flatten(0, 1)[batch.states_Q][batch.questions_T]


AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, _Mask)
