"""Attention where every state is computed once: sequences are put together for it and taken apart behind it.

Queries, keys and values of the distinct states are copied to the rows of their sequences, PyTorch's fused attention
runs on these as it would without sharing, and each state takes its output from its first row. A state's keys and values
have gradients from every row that holds them; these are added up in FP32.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.batching import pad_batch
from mismatch_probe.training_path.prefixes import SharedPrefixes, StateBatch, share_prefixes

SHARED_ATTENTION: Final = "sdpa_of_shared_prefixes"
_TOLERANCE: Final = 1e-3
"""Of the largest state, in FP32; a model that mixes tokens elsewhere than in attention is off by about 1."""
_PROBES: Final = ([3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 2], [3, 1, 4, 8, 2, 8], [2, 7, 1], [3, 1, 4, 1, 5])


class _Mask:
    """A mask that is made where the length of the sequences is known.

    Not a dataclass, and without the model's config: FSDP makes a copy of such arguments for every layer.
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

    That is tried on a few tokens, in the format of the model's parameters; a model that cannot take them raises and is
    left as it was. One that scales attention by a token's place in the inputs, not by its position, does so far behind
    these few tokens only, so it is told by its config.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or getattr(config, "attn_temperature_tuning", False):
        return False
    sequences = [TokenSequence("probe", ids[:2], ids[2:]) for ids in _PROBES]
    embeddings: Any = model.get_input_embeddings()
    padded = StateBatch.padded(pad_batch(sequences, vocab_size=embeddings.weight.shape[0]))
    with torch.no_grad():
        expected_TD = _states(model, padded)
        try:
            model.set_attn_implementation(SHARED_ATTENTION)
            shared_TD = _states(model, share_prefixes(sequences))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            shared_TD = torch.full_like(expected_TD, torch.nan)
    scale = expected_TD.abs().max()
    shares = bool(((shared_TD - expected_TD).abs() <= _TOLERANCE * scale).all())
    if not shares:
        model.set_attn_implementation("sdpa")
    return shares


def _states(model: PreTrainedModel, batch: StateBatch) -> torch.Tensor:
    """The state before each response token [T, D]."""
    body: Callable[..., Any] = model.base_model
    hidden_BSD: torch.Tensor = body(**batch.model_inputs(model.device), use_cache=False).last_hidden_state
    return hidden_BSD.flatten(0, 1)[batch.states_Q][batch.questions_T]


AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, _Mask)
