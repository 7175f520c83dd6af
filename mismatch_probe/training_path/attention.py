"""The reference's attention: the model's own eager formula for a block of queries at a time, or a fused kernel.

Eager attention is the definition of each architecture, with soft caps and attention sinks, which fused kernels may
drop. Blocks bound its memory; keys after a block's last query are left out where the mask is plainly causal. Fused
kernels are several times faster on long sequences, and are used only where the model shows that they compute the same
formula.

On one batch, every attention module computes its output three times from the same queries, keys and values: by its
eager formula, by a fused kernel, and by its eager formula in FP64. The fused kernel is used where its error against
FP64 has the size of the eager formula's rounding error. What a kernel leaves out makes a far larger error.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from mismatch_probe.training_path.arithmetic import Arithmetic, Float64Throughout
from mismatch_probe.training_path.loading import has_sdpa, sdpa_leaves_out
from mismatch_probe.training_path.observation import short_pass_ids

EAGER_IN_BLOCKS: Final = "eager_in_blocks"
FUSED: Final = "fused_sdpa"
_MIN_QUERIES: Final = 64
_SCORES_PER_BLOCK: Final = {"cpu": 2**20, "cuda": 2**26}


def use_reference_kernels(model: PreTrainedModel) -> None:
    """Set attention in blocks and experts one by one; a model in `eager` that cannot have blocks stays in it."""
    if hasattr(sys.modules[type(model).__module__], "eager_attention_forward"):
        model.set_attn_implementation(EAGER_IN_BLOCKS)
    model.set_experts_implementation("eager")


def eager_in_blocks(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [B, S, H, D] of the eager function in the file that defines `module`'s class.

    `attention_mask` is boolean [B, 1, S, S], true where a query may look, or None for plain causal attention, and in
    what sees images for attention without a mask.
    """
    eager = sys.modules[type(module).__module__].eager_attention_forward
    num_rows, num_heads, num_queries, _ = query_BHSD.shape
    num_keys = key_BHSD.shape[2]
    budget = _SCORES_PER_BLOCK.get(query_BHSD.device.type, 2**26)
    block = min(num_queries, max(_MIN_QUERIES, budget // (num_heads * num_keys)))
    row_block = max(1, budget // (num_heads * num_keys * block))
    output_BSHD = query_BHSD.new_empty(num_rows, num_queries, num_heads, value_BHSD.shape[3])
    for first_row, start in product(range(0, num_rows, row_block), range(0, num_queries, block)):
        rows = slice(first_row, first_row + row_block)
        queries = slice(start, min(start + block, num_queries))
        if attention_mask is None and not _is_causal(module, kwargs):
            visible = num_keys
            mask = torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=query_BHSD.device)
        elif attention_mask is None:
            visible = num_keys - num_queries + queries.stop
            mask = _causal_mask(queries, visible, num_keys - num_queries, query_BHSD.device)
        else:
            visible = num_keys
            mask = attention_mask[rows, :, queries]
        bias = torch.zeros(mask.shape, dtype=query_BHSD.dtype, device=mask.device)
        bias.masked_fill_(~mask, torch.finfo(bias.dtype).min)
        output_BSHD[rows, queries], _ = eager(
            module,
            query_BHSD[rows, :, queries],
            key_BHSD[rows, :, :visible],
            value_BHSD[rows, :, :visible],
            bias,
            **kwargs,
        )
    return output_BSHD, None


def _is_causal(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether attention without a mask is causal: the patches of an image see each other."""
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _causal_mask(queries: slice, num_keys: int, offset: int, device: torch.device) -> torch.Tensor:
    query_index = torch.arange(queries.start, queries.stop, device=device)[:, None] + offset
    return (torch.arange(num_keys, device=device)[None, :] <= query_index)[None, None]


def fused_sdpa(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Plain softmax attention [B, S, H, D] by `scaled_dot_product_attention`; the mask is that of `eager_in_blocks`.

    Keys and values are repeated for the heads that share them: with `enable_gqa`, PyTorch has no fused FP32 kernel on
    CUDA and would hold a matrix of tokens by tokens for each head.
    """
    groups = query_BHSD.shape[1] // key_BHSD.shape[1]
    if groups > 1:
        key_BHSD, value_BHSD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_BHSD, value_BHSD))
    # A single query, behind a cache, sees every key.
    is_causal = attention_mask is None and query_BHSD.shape[2] > 1 and _is_causal(module, kwargs)
    output_BHSD = torch.nn.functional.scaled_dot_product_attention(
        query_BHSD, key_BHSD, value_BHSD, attn_mask=attention_mask, is_causal=is_causal, scale=scaling
    )
    return output_BHSD.transpose(1, 2).contiguous(), None


AttentionInterface.register(EAGER_IN_BLOCKS, eager_in_blocks)
AttentionMaskInterface.register(EAGER_IN_BLOCKS, sdpa_mask)
AttentionInterface.register(FUSED, fused_sdpa)
AttentionMaskInterface.register(FUSED, sdpa_mask)


_PROBE_TOKENS: Final = 128
_TIMES_ROUNDING: Final = 8.0
_FUSED_KERNELS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_COMPARING: Final = "eager_beside_fused"


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen attention and the reason. Errors are the largest of any module against FP64, in units of its largest
    value; they are None where fused kernels were not tried.
    """

    fused: bool
    why: str
    fused_error: float | None = None
    eager_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_reference_attention(model: PreTrainedModel, arithmetic: Arithmetic) -> AttentionChoice:
    """Set fused attention in a model that computes `eager_in_blocks`, where it is the same formula."""
    if model.config.get_text_config()._attn_implementation != EAGER_IN_BLOCKS:
        return AttentionChoice(False, "the model's attention cannot be exchanged")
    omission = sdpa_leaves_out(model.config)
    if omission is not None:
        return AttentionChoice(False, f"SDPA leaves out {omission}")
    if not has_sdpa(model.config):
        return AttentionChoice(False, "transformers has no SDPA attention for this architecture")
    comparison = _Comparison()
    AttentionInterface.register(_COMPARING, comparison)
    AttentionMaskInterface.register(_COMPARING, sdpa_mask)
    model.set_attn_implementation(_COMPARING)
    with arithmetic.active():
        model(input_ids=short_pass_ids(model, _PROBE_TOKENS), use_cache=False)
    choice = comparison.choice()
    model.set_attn_implementation(FUSED if choice.fused else EAGER_IN_BLOCKS)
    return choice


class _Comparison:
    """An attention function that computes all three and returns the eager formula's output."""

    def __init__(self) -> None:
        self._fused_errors: list[float] = []
        self._eager_errors: list[float] = []
        self._has_failed = False

    def __call__(
        self,
        module: torch.nn.Module,
        query_BHSD: torch.Tensor,
        key_BHSD: torch.Tensor,
        value_BHSD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        tensors = (query_BHSD, key_BHSD, value_BHSD)
        eager, _ = eager_in_blocks(module, *tensors, attention_mask, **kwargs)
        with Float64Throughout():
            query, key, value = (tensor.double() for tensor in tensors)
            exact, _ = eager_in_blocks(module, query, key, value, attention_mask, **kwargs)
        unit = value_BHSD.abs().max().double()
        self._rounding = torch.finfo(query_BHSD.dtype).eps
        self._eager_errors.append(float((eager - exact).abs().max() / unit))
        try:
            with sdpa_kernel(_FUSED_KERNELS):
                fused_output, _ = fused_sdpa(module, *tensors, attention_mask, **kwargs)
        except RuntimeError:  # how PyTorch says that none of these kernels takes such tensors
            self._has_failed = True
        else:
            self._fused_errors.append(float((fused_output - exact).abs().max() / unit))
        return eager, None

    def choice(self) -> AttentionChoice:
        if self._has_failed or not self._fused_errors:
            return AttentionChoice(False, "no fused kernel takes this architecture's attention")
        is_close = (
            fused_error <= _TIMES_ROUNDING * max(eager_error, self._rounding)
            for fused_error, eager_error in zip(self._fused_errors, self._eager_errors, strict=True)
        )
        holds = all(is_close)
        formula = "the architecture's formula within rounding" if holds else "another formula than the architecture's"
        return AttentionChoice(
            holds, f"a fused kernel computes {formula}", max(self._fused_errors), max(self._eager_errors)
        )
