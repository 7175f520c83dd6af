"""From logits to what a leg records about each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path.head import ChunkedHead

_CHUNK_BYTES: Final = 128 * 2**20


@dataclass(frozen=True)
class TokenScores:
    """Per token [T]: log-prob in nats, arg-max token before it, entropy in nats of its distribution."""

    logprobs_T: torch.Tensor
    top1_ids_T: torch.Tensor
    entropy_nats_T: torch.Tensor

    def by_sequence(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        """The scores of each response, of those of all their tokens in a row."""
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
    scaled_TV = _scaled(logits_TV, temperature, log_softmax_dtype)
    top1_ids_T = scaled_TV.argmax(dim=-1)
    log_softmax_TV = torch.log_softmax(scaled_TV, dim=-1).to(result_dtype)
    logprobs_T = log_softmax_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    probabilities_TV = log_softmax_TV.exp()
    log_softmax_TV.clamp_(min=torch.finfo(result_dtype).min)
    entropy_nats_T = -probabilities_TV.mul_(log_softmax_TV).sum(dim=-1)
    return TokenScores(logprobs_T, top1_ids_T, entropy_nats_T)


def log_distributions(logits_TV: torch.Tensor, *, temperature: float, log_softmax_dtype: torch.dtype) -> torch.Tensor:
    """Log-probs of every token [T, V], as `score_logits` has them of one."""
    result_dtype = torch.promote_types(log_softmax_dtype, torch.float32)
    return torch.log_softmax(_scaled(logits_TV, temperature, log_softmax_dtype), dim=-1).to(result_dtype)


def _scaled(logits_TV: torch.Tensor, temperature: float, dtype: torch.dtype) -> torch.Tensor:
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
    """`score_logits` in chunks of tokens whose logits and temporaries stay within _CHUNK_BYTES."""
    result_dtype = torch.promote_types(log_softmax_dtype, torch.float32)
    chunk_tokens = max(1, _CHUNK_BYTES // (vocab_size * (3 * hidden_TD.dtype.itemsize + 4 * result_dtype.itemsize)))
    # What outlives a chunk would pin the heap around its freed temporaries, so results are filled in place.
    scores = TokenScores(
        torch.empty_like(targets_T, dtype=result_dtype),
        torch.empty_like(targets_T),
        torch.empty_like(targets_T, dtype=result_dtype),
    )

    def score(chunk: slice) -> None:
        logits = head.logits(hidden_TD[chunk])
        targets = targets_T[chunk].to(logits.device)
        chunk_scores = score_logits(logits, targets, temperature=temperature, log_softmax_dtype=log_softmax_dtype)
        scores.logprobs_T[chunk] = chunk_scores.logprobs_T
        scores.top1_ids_T[chunk] = chunk_scores.top1_ids_T
        scores.entropy_nats_T[chunk] = chunk_scores.entropy_nats_T

    for start in range(0, len(targets_T), chunk_tokens):
        score(slice(start, start + chunk_tokens))
    return scores
