# mypy: allow-untyped-calls
# ruff: noqa: N803, N806, N815 - shape suffixes
"""From logits to what a leg records about each token."""

from dataclasses import dataclass
from typing import Final

import torch

from mismatch_probe.training_path.head import ChunkedHead

_CHUNK_BYTES: Final = 128 * 2**20


@dataclass(frozen=True)
class TokenScores:
    """Per token [T]: log-prob in nats, arg-max token before it, entropy in nats of its distribution."""

    logprobs_T: torch.Tensor
    top1_ids_T: torch.Tensor
    entropy_nats_T: torch.Tensor

    @staticmethod
    def concatenate(parts: list["TokenScores"]) -> "TokenScores":
        return TokenScores(
            torch.cat([part.logprobs_T for part in parts]),
            torch.cat([part.top1_ids_T for part in parts]),
            torch.cat([part.entropy_nats_T for part in parts]),
        )


def score_logits(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, *, temperature: float, log_softmax_dtype: torch.dtype
) -> TokenScores:
    """Scores under softmax(logits / temperature), with division and log-softmax in `log_softmax_dtype`.

    Results are FP32, or FP64 where that is the log-softmax's format. Non-finite logits give non-finite log-probs; a
    logit of minus infinity is a token of probability 0 and adds nothing to the entropy.
    """
    result_dtype = torch.promote_types(log_softmax_dtype, torch.float32)
    scaled_TV = logits_TV.to(log_softmax_dtype)
    if temperature != 1:
        scaled_TV = scaled_TV / temperature
    top1_ids_T = scaled_TV.argmax(dim=-1)
    log_softmax_TV = torch.log_softmax(scaled_TV, dim=-1).to(result_dtype)
    logprobs_T = log_softmax_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    probabilities_TV = log_softmax_TV.exp()
    log_softmax_TV.clamp_(min=torch.finfo(result_dtype).min)
    entropy_nats_T = -probabilities_TV.mul_(log_softmax_TV).sum(dim=-1)
    return TokenScores(logprobs_T, top1_ids_T, entropy_nats_T)


def score_hidden_states(
    head: ChunkedHead,
    hidden_TD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    log_softmax_dtype: torch.dtype,
) -> TokenScores:
    """`score_logits` in chunks of tokens whose logits and temporaries stay within _CHUNK_BYTES."""
    result_itemsize = torch.promote_types(log_softmax_dtype, torch.float32).itemsize
    bytes_per_logit = 3 * hidden_TD.dtype.itemsize + 4 * result_itemsize
    chunk_tokens = max(1, _CHUNK_BYTES // (vocab_size * bytes_per_logit))
    parts = []
    for hidden_chunk, target_chunk in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True):
        logits = head.logits(hidden_chunk)
        targets = target_chunk.to(logits.device)
        parts.append(score_logits(logits, targets, temperature=temperature, log_softmax_dtype=log_softmax_dtype))
    return TokenScores.concatenate(parts)
