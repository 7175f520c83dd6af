"""The reference's attention: the model's own eager formula a block of queries at a time, or PyTorch's fused kernels.

Eager attention is the definition of each architecture, soft caps and attention sinks included, which fused kernels may
drop; blocks bound its memory, and keys after a block's last query are left out where the mask is plainly causal. Fused
kernels are several times faster on long sequences; `attention_choice` says where they compute the same formula.
"""

import sys
from itertools import product
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

EAGER_IN_BLOCKS: Final = "eager_in_blocks"
FUSED: Final = "fused_sdpa"
_MIN_QUERIES: Final = 64
_SCORES_PER_BLOCK: Final = {"cpu": 2**20, "cuda": 2**26}


def use_reference_kernels(model: PreTrainedModel) -> None:
    """Attention in blocks and experts one by one; a model loaded with `eager` that cannot have blocks keeps that."""
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

    `attention_mask` is boolean [B, 1, S, S], true where a query may look, or None for plain causal attention.
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
        if attention_mask is None:
            visible = num_keys - num_queries + queries.stop
            allowed = _causal(queries, visible, num_keys - num_queries, query_BHSD.device)
        else:
            visible = num_keys
            allowed = attention_mask[rows, :, queries]
        bias = torch.zeros(allowed.shape, dtype=query_BHSD.dtype, device=allowed.device)
        bias.masked_fill_(~allowed, torch.finfo(bias.dtype).min)
        output_BSHD[rows, queries], _ = eager(
            module,
            query_BHSD[rows, :, queries],
            key_BHSD[rows, :, :visible],
            value_BHSD[rows, :, :visible],
            bias,
            **kwargs,
        )
    return output_BSHD, None


def _causal(queries: slice, num_keys: int, offset: int, device: torch.device) -> torch.Tensor:
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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Plain softmax attention [B, S, H, D] by `scaled_dot_product_attention`; the mask is that of `eager_in_blocks`.

    Keys and values are repeated for the heads that share them: with `enable_gqa`, PyTorch has no fused FP32 kernel on
    CUDA and would hold a matrix of tokens by tokens for each head.
    """
    groups = query_BHSD.shape[1] // key_BHSD.shape[1]
    if groups > 1:
        key_BHSD, value_BHSD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_BHSD, value_BHSD))
    output_BHSD = torch.nn.functional.scaled_dot_product_attention(
        query_BHSD, key_BHSD, value_BHSD, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling
    )
    return output_BHSD.transpose(1, 2).contiguous(), None


AttentionInterface.register(EAGER_IN_BLOCKS, eager_in_blocks)
AttentionMaskInterface.register(EAGER_IN_BLOCKS, sdpa_mask)
AttentionInterface.register(FUSED, fused_sdpa)
AttentionMaskInterface.register(FUSED, sdpa_mask)
