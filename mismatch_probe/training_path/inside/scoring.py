# mypy: allow-untyped-calls

"""One pass over a batch, its hidden states kept for what is asked of them afterwards."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mismatch_probe.records.activations import ActivationBatch
from mismatch_probe.records.sequences import ScoredSequence
from mismatch_probe.training_path.batching import PaddedBatch, pad_batch
from mismatch_probe.training_path.head import ChunkedHead
from mismatch_probe.training_path.inside.rows import Layout
from mismatch_probe.training_path.logprobs import score_hidden_states


@dataclass(frozen=True)
class BatchPass:
    """A batch that has gone through a model's body."""

    batch: ActivationBatch
    padded: PaddedBatch
    head: ChunkedHead
    hidden_BSD: Tensor
    vocab_size: int

    @classmethod
    def run(cls, model: PreTrainedModel, batch: ActivationBatch) -> "BatchPass":
        """Enter the arithmetic first."""
        embeddings: Any = model.get_input_embeddings()
        vocab_size: int = embeddings.weight.shape[0]
        padded = pad_batch(batch.sequences, vocab_size=vocab_size)
        head = ChunkedHead(model)
        return cls(batch, padded, head, head.body(padded.input_ids_BS.to(model.device)), vocab_size)

    def hidden_rows(self, layout: Layout) -> Tensor:
        """Final hidden states [T, D], one row a token."""
        return layout.pack(self.hidden_BSD)


def score_pass(done: BatchPass, *, log_softmax_dtype: torch.dtype = torch.float32) -> list[ScoredSequence]:
    """Log-probs of the responses' tokens at temperature 1, through the model's own head."""
    device = done.hidden_BSD.device
    scores = score_hidden_states(
        done.head,
        done.hidden_BSD[done.padded.rows_T.to(device), done.padded.positions_T.to(device)],
        done.padded.targets_T.to(device),
        vocab_size=done.vocab_size,
        temperature=1.0,
        log_softmax_dtype=log_softmax_dtype,
    )
    logprobs = scores.logprobs_T.cpu().split(done.padded.response_lengths)
    return [
        ScoredSequence(sequence.id, values.numpy())
        for sequence, values in zip(done.batch.sequences, logprobs, strict=True)
    ]
