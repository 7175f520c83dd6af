# mypy: allow-untyped-calls
# ruff: noqa: N806 - shape suffixes
"""The responses as every run computes them: the same batches, log-probs and loss in each precision."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mismatch_probe.headroom.loss import ResponseLoss
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.batching import pad_batch, plan_batches
from mismatch_probe.training_path.memory import memory_errors_named


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
        """Log-probs [T] in nats of a batch's response tokens, in order, computed in FP32 from the model's logits as
        `train` does.

        Padding, with id 0 to the right, is computed as any token: what overflows there reaches the weights' gradients.

        Raises:
            OutOfMemory: the batch does not fit.
        """
        padded = pad_batch([self.sequences[row] for row in rows], vocab_size=self.vocab_size)
        device = model.device
        num_rows, width = padded.input_ids_BS.shape
        advice = "lower --batch-tokens, or --max-new-tokens where one response does not fit"
        with memory_errors_named(f"computing {num_rows} sequences of up to {width} tokens", advice):
            logits_BSV = model(input_ids=padded.input_ids_BS.to(device), use_cache=False).logits
            logits_TV = logits_BSV[padded.rows_T.to(device), padded.positions_T.to(device)].float() / self.temperature
            return torch.log_softmax(logits_TV, dim=-1).gather(-1, padded.targets_T.to(device)[:, None]).squeeze(-1)
