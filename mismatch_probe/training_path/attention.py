"""The reference's attention: the model's own eager formula, a block of queries at a time.

Eager attention is the definition of each architecture, soft caps and attention sinks included, which fused kernels may
drop; blocks bound its memory, and keys after a block's last query are left out where the mask is plainly causal.
"""

import sys
from itertools import product
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

REFERENCE_ATTENTION: Final = "eager_in_blocks"
_MIN_QUERIES: Final = 64
_SCORES_PER_BLOCK: Final = {"cpu": 2**20, "cuda": 2**26}


def use_reference_kernels(model: PreTrainedModel) -> None:
    """Attention in blocks and experts one by one; a model loaded with `eager` that cannot have blocks keeps that."""
    if hasattr(sys.modules[type(model).__module__], "eager_attention_forward"):
        model.set_attn_implementation(REFERENCE_ATTENTION)
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


AttentionInterface.register(REFERENCE_ATTENTION, eager_in_blocks)
AttentionMaskInterface.register(REFERENCE_ATTENTION, sdpa_mask)
