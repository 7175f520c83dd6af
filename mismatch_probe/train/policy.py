"""pi in training: log-probs of tokens with a gradient, and its weights for others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import is_main, world_size
from mismatch_probe.train.sharded import ShardedModel, merged_parameters
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.batching import ChunkedHead
from mismatch_probe.training_path.observation import describe_model
from mismatch_probe.training_path.prefixes import StateBatch

_CHUNK_BYTES: Final = 256 * 2**20
_LEAST_LOGPROB: Final = -100.0
"""Nats; the square of a smaller one times its probability is 0 in FP32."""


class TokenLogprobs(torch.nn.Module):
    """A causal language model that answers with log-probs; as FSDP's root it keeps head and embeddings gathered."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._head = ChunkedHead(model)
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]

    def forward(self, batch: StateBatch, *, with_variance: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probs with gradient and entropies without, of the batch's response tokens [T], in nats and FP32; and
        `with_variance`, of a few tokens, the variance of log pi over the vocabulary.

        Logits are divided by the sampling temperature in FP32, as vLLM does. Chunks of logits are computed again in
        the backward pass where more than one chunk is needed.
        """
        device = self.model.device
        hidden_BSD = self._head.body(**batch.model_inputs(device))
        hidden_QD = hidden_BSD.flatten(0, 1)[batch.states_Q.to(device)]
        logprobs_Q, entropy_Q = self._answer_questions(hidden_QD, batch.targets_Q.to(device))
        variance = (self._variances(hidden_QD),) if with_variance else ()
        questions_T = batch.questions_T.to(device)
        return tuple(answers_Q[questions_T] for answers_Q in (logprobs_Q, entropy_Q, *variance))

    def _answer_questions(self, hidden_QD: torch.Tensor, targets_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(1, _CHUNK_BYTES // (8 * self._vocab_size))
        if len(targets_Q) <= size:
            return self._score_questions(hidden_QD, targets_Q)
        chunks = [
            checkpoint(self._score_questions, states, targets, use_reentrant=False)
            for states, targets in zip(hidden_QD.split(size), targets_Q.split(size), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score_questions(self, hidden_QD: torch.Tensor, targets_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_softmax_QV = self._log_softmax(hidden_QD)
        with torch.no_grad():
            entropy_Q = torch.special.entr(log_softmax_QV.exp()).sum(dim=-1)
        return log_softmax_QV.take_along_dim(targets_Q[:, None], dim=-1).flatten().clone(), entropy_Q

    def _log_softmax(self, hidden_QD: torch.Tensor) -> torch.Tensor:
        logits_QV = self._head.logits(hidden_QD).float()
        if self._temperature != 1:
            logits_QV = logits_QV / self._temperature
        return torch.log_softmax(logits_QV, dim=-1)

    @torch.no_grad()
    def _variances(self, hidden_QD: torch.Tensor) -> torch.Tensor:
        log_softmax_QV = self._log_softmax(hidden_QD)
        probabilities_QV = log_softmax_QV.exp()
        entropy_Q1 = torch.special.entr(probabilities_QV).sum(dim=-1, keepdim=True)
        surprise_QV = log_softmax_QV.clamp(min=_LEAST_LOGPROB) + entropy_Q1
        variance_Q: torch.Tensor = (probabilities_QV * surprise_QV**2).sum(dim=-1)
        return variance_Q


class Policy(ShardedModel[TokenLogprobs]):
    """The language model that is trained."""

    def __init__(
        self,
        folder: Path,
        dtype: Dtype,
        settings: PolicySettings,
        *,
        temperature: float,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            folder,
            dtype,
            settings,
            lambda model: TokenLogprobs(model, temperature),
            trust_remote_code=trust_remote_code,
            seed=seed,
        )
        self._model = self.module.model

    def effective_settings(self) -> dict[str, Any]:
        """What the policy is made of, read back."""
        return {
            **describe_model(self._model),
            "compute_dtype": self.dtype,
            "shares_prefixes": self.shares_prefixes,
            "reduce_dtype": Dtype.FP32,
            "trainable_parameters": sum(parameter.numel() for parameter in self.trainable()),
            "ranks": world_size(),
        }

    def logprobs(self, sequences: list[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs, with a gradient where one is wanted, and entropies of the response tokens [T] of a micro-batch."""
        logprobs_T, entropy_T = self._forward_batch(sequences)
        return logprobs_T, entropy_T

    def surprises(self, sequences: list[TokenSequence]) -> tuple[Floats, Floats]:
        """Of few response tokens [T]: log pi + entropy, which is 0 in expectation for tokens drawn from pi, and its
        variance over the vocabulary.
        """
        with torch.no_grad(), self.computing():
            logprobs_T, entropy_T, variance_T = self._forward_batch(sequences, with_variance=True)
        return (logprobs_T + entropy_T).double().cpu().numpy(), variance_T.double().cpu().numpy()

    def weights(self, dtype: Dtype = Dtype.FP32) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight whole, adapters merged in FP32, rounded once to `dtype`, under its checkpoint's name.

        Every rank must go through it to the end.
        """
        target = torch_dtype(dtype)
        parameters = merged_parameters(self._model)
        if getattr(self._model, "_weight_conversions", None):
            parameters = iter(revert_weight_conversion(self._model, dict(parameters)).items())
        for name, tensor in parameters:
            yield name, tensor.to(target)

    def save(self, folder: Path) -> None:
        """The merged model as a transformers checkpoint in FP32; every rank must call it, the first one writes."""
        parameters = {}
        for name, tensor in merged_parameters(self._model):
            if is_main():
                parameters[name] = tensor.cpu()
        if is_main():
            self._model.save_pretrained(folder, state_dict=parameters)
