"""Log-probs of given tokens with a gradient, never a whole [tokens, vocabulary] tensor."""

from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mismatch_probe.training_path.batching import PaddedBatch
from mismatch_probe.training_path.head import ChunkedHead

_CHUNK_BYTES: Final = 256 * 2**20


class TokenLogprobs(torch.nn.Module):
    """A causal language model that answers with log-probs; as FSDP's root it keeps head and embeddings gathered."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._head = ChunkedHead(model)
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]

    def forward(self, batch: PaddedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs with gradient and entropies without, of the batch's response tokens [T], in nats and FP32.

        Logits are divided by the sampling temperature in FP32, as vLLM does. Chunks of logits are computed again in
        the backward pass where more than one chunk is needed.
        """
        device = self.model.device
        hidden_BSD = self._head.body(batch.input_ids_BS.to(device))
        hidden_TD = hidden_BSD[batch.rows_T.to(device), batch.positions_T.to(device)]
        targets_T = batch.targets_T.to(device)
        size = max(1, _CHUNK_BYTES // (8 * self._vocab_size))
        if len(targets_T) <= size:
            return self._score(hidden_TD, targets_T)
        chunks = [
            checkpoint(self._score, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(hidden_TD.split(size), targets_T.split(size), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TV = self._head.logits(hidden_TD).float()
        if self._temperature != 1:
            logits_TV = logits_TV / self._temperature
        log_softmax_TV = torch.log_softmax(logits_TV, dim=-1)
        with torch.no_grad():
            entropy_T = torch.special.entr(log_softmax_TV.exp()).sum(dim=-1)
        return log_softmax_TV.take_along_dim(targets_T[:, None], dim=-1).flatten().clone(), entropy_T
