"""The responses as every run computes them: the same batches, log-probs and loss in each precision."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mismatch_probe.headroom.computing import response_logprobs
from mismatch_probe.headroom.loss import ResponseLoss
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.batching import plan_batches


@dataclass(frozen=True)
class BatchedResponses:
    """`batches` are numbers of sequences that share a forward pass; `loss` takes their log-probs and numbers."""

    sequences: list[TokenSequence]
    batches: list[list[int]]
    loss: ResponseLoss
    vocab_size: int
    temperature: float

    @classmethod
    def plan(
        cls, sequences: list[TokenSequence], loss: ResponseLoss, *, vocab_size: int, temperature: float, tokens: int
    ) -> "BatchedResponses":
        """Batches of up to `tokens` padded tokens."""
        batches = plan_batches([sequence.num_tokens for sequence in sequences], tokens)
        return cls(sequences, batches, loss, vocab_size, temperature)

    def logprobs(self, model: PreTrainedModel, rows: Sequence[int]) -> torch.Tensor:
        """Log-probs [T] of a batch's response tokens, FP32, nats. Raises as `response_logprobs`."""
        chosen = [self.sequences[row] for row in rows]
        return response_logprobs(model, chosen, vocab_size=self.vocab_size, temperature=self.temperature)
