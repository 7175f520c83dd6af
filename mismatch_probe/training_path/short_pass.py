"""A short forward pass at load: which formats the products take, and whether the chunked head is the model's own."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from mismatch_probe.errors import EngineError
from mismatch_probe.training_path.head import ChunkedHead
from mismatch_probe.training_path.observation import ProductFormats

_PROBE_TOKENS: Final = 16
_ID_STRIDE: Final = 7919
_TOLERANCE_ROUNDINGS: Final = 8.0


@dataclass(frozen=True)
class ShortPass:
    """`head_difference` is the largest between chunked and plain logits, relative to the largest logit."""

    body_formats: ProductFormats
    head_formats: ProductFormats
    head_difference: float


def short_pass(model: PreTrainedModel, head: ChunkedHead) -> ShortPass:
    """Run a few tokens in the arithmetic that is active.

    Raises:
        EngineError: logits in chunks differ from those of one pass by more than the order of summation explains.
    """
    input_ids = short_pass_ids(model, _PROBE_TOKENS)
    plain = model(input_ids=input_ids, use_cache=False).logits[0]
    with ProductFormats() as body_formats:
        hidden = head.body(input_ids)[0]
    with ProductFormats() as head_formats:
        chunked = torch.cat([head.logits(half) for half in hidden.split(_PROBE_TOKENS // 2)])
    difference = _relative_difference(plain, chunked)
    if difference is None or difference > _by_order_of_summation(plain.dtype, hidden.shape[-1]):
        raise EngineError(
            f"{type(model).__name__} gives other logits in chunks than in one pass, so its log-probs cannot be "
            "trusted; use a causal language model whose forward is its base model followed by its head"
        )
    return ShortPass(body_formats, head_formats, difference)


def short_pass_ids(model: PreTrainedModel, num_tokens: int) -> torch.Tensor:
    """Token ids [1, S] from all over the vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    vocab_size: int = embeddings.weight.shape[0]
    return (torch.arange(num_tokens, device=model.device) * _ID_STRIDE % vocab_size)[None]


def _by_order_of_summation(dtype: torch.dtype, width: int) -> float:
    """How far two sums of `width` products may lie apart, relative to the largest: kernels choose the order by shape.

    Each rounds once to its format, and errs by sqrt(width) roundings of the format that it is added up in, which is
    FP32 or wider [Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis].
    """
    written = torch.finfo(dtype).eps
    added_up = min(written, torch.finfo(torch.float32).eps)
    return float(_TOLERANCE_ROUNDINGS * (written + width**0.5 * added_up))


def _relative_difference(plain: torch.Tensor, chunked: torch.Tensor) -> float | None:
    """None where the two cannot be the same logits: another shape, or finite in other places."""
    if plain.shape != chunked.shape or not torch.equal(plain.isfinite(), chunked.isfinite()):
        return None
    finite = plain.isfinite()
    if torch.equal(plain[finite], chunked[finite]):
        return 0.0
    difference = (chunked - plain)[finite].abs().max() / plain[finite].abs().max()
    return float(difference)
