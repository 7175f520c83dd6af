"""pi in training: what it says of tokens, and its weights for others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.adapters import merged_parameters
from mismatch_probe.train.distributed import is_main, world_size
from mismatch_probe.train.sharded import ShardedModel
from mismatch_probe.train.token_logprobs import TokenLogprobs
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.observation import describe_model


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
        """Raises as `ShardedModel`."""
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
        """Log-probs, with a gradient where one is wanted, and entropies of the response tokens [T] of a micro-batch.

        Raises:
            UsageError: a sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: it does not fit.
        """
        logprobs_T, entropy_T = self._compute(sequences)
        return logprobs_T, entropy_T

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
