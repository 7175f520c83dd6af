"""Log-probs of given tokens with a gradient, never a whole [tokens, vocabulary] tensor."""

from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mismatch_probe.training_path.head import ChunkedHead
from mismatch_probe.training_path.prefixes import StateBatch

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

    def forward(self, batch: StateBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs with gradient and entropies without, of the batch's response tokens [T], in nats and FP32.

        Logits are divided by the sampling temperature in FP32, as vLLM does. Chunks of logits are computed again in
        the backward pass where more than one chunk is needed.
        """
        device = self.model.device
        hidden_BSD = self._head.body(**batch.model_inputs(device))
        hidden_QD = hidden_BSD.flatten(0, 1)[batch.states_Q.to(device)]
        logprobs_Q, entropy_Q = self._answer(hidden_QD, batch.targets_Q.to(device))
        questions_T = batch.questions_T.to(device)
        return logprobs_Q[questions_T], entropy_Q[questions_T]

    def _answer(self, hidden_QD: torch.Tensor, targets_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(1, _CHUNK_BYTES // (8 * self._vocab_size))
        if len(targets_Q) <= size:
            return self._score(hidden_QD, targets_Q)
        chunks = [
            checkpoint(self._score, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(hidden_QD.split(size), targets_Q.split(size), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden_QD: torch.Tensor, targets_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_QV = self._head.logits(hidden_QD).float()
        if self._temperature != 1:
            logits_QV = logits_QV / self._temperature
        log_softmax_QV = torch.log_softmax(logits_QV, dim=-1)
        with torch.no_grad():
            entropy_Q = torch.special.entr(log_softmax_QV.exp()).sum(dim=-1)
        return log_softmax_QV.take_along_dim(targets_Q[:, None], dim=-1).flatten().clone(), entropy_Q
