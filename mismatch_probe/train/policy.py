"""pi in training: FP32 master weights, computed in the training dtype by FSDP2, on one process or many."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.adapters import add_adapters, merged_parameters
from mismatch_probe.train.distributed import is_main, world_size
from mismatch_probe.train.token_logprobs import TokenLogprobs
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.batching import pad_batch
from mismatch_probe.training_path.loading import choose_device, load_model
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.observation import describe_model
from mismatch_probe.training_path.precision import decoder_layers
from mismatch_probe.training_path.products import CpuProducts


class Policy:
    """The trained model, in the process group at hand.

    Parameters are FP32; products, activations and their gradients are in `dtype`.
    """

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
        """
        Raises:
            UsageError: the checkpoint or the device cannot be used.
            MissingExtra: adapters are asked for and peft is not installed.
            OutOfMemory: the weights do not fit.
        """
        self.dtype = dtype
        self.device = choose_device(settings.device)
        self._micro_batch_tokens = settings.micro_batch_tokens
        self._model: PreTrainedModel = load_model(
            folder,
            dtype=torch.float32,
            attention=settings.attention,
            device=self.device,
            device_map=None,
            trust_remote_code=trust_remote_code,
        )
        embeddings: Any = self._model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]
        layers = decoder_layers(self._model)
        if settings.lora is not None:
            add_adapters(self._model, settings.lora, seed=seed)
        if settings.gradient_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            self._model.train()
        self.module = TokenLogprobs(self._model, temperature)
        sharding: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (world_size(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch_dtype(dtype), reduce_dtype=torch.float32),
        }
        for layer in layers:
            fully_shard(layer, **sharding)
        fully_shard(self.module, **sharding)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def effective_settings(self) -> dict[str, Any]:
        """What the policy is made of, read back."""
        return {
            **describe_model(self._model),
            "compute_dtype": self.dtype,
            "reduce_dtype": "fp32",
            "trainable_parameters": sum(parameter.numel() for parameter in self.trainable()),
            "ranks": world_size(),
        }

    def computing(self) -> AbstractContextManager[Any]:
        """Enter it around forward and backward passes: products on a CPU follow `training_path.products`."""
        return CpuProducts() if self.device.type == "cpu" and self.dtype in ("fp16", "fp32") else nullcontext()

    def logprobs(self, sequences: list[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs, with a gradient where one is wanted, and entropies of the response tokens [T] of a micro-batch.

        Raises:
            UsageError: a sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: it does not fit.
        """
        padded = pad_batch(sequences, vocab_size=self._vocab_size)
        num_rows, width = padded.input_ids_BS.shape
        with memory_errors_named(
            f"computing {num_rows} sequences of up to {width} tokens",
            f"halve policy.micro_batch_tokens (now {self._micro_batch_tokens}), or set policy.gradient_checkpointing",
        ):
            logprobs_T, entropy_T = self.module(padded)
        if not torch.is_grad_enabled():
            # FSDP keeps its root gathered in `dtype` for a backward pass, and until then that is what parameters read.
            cast(FSDPModule, self.module).reshard()
        return logprobs_T, entropy_T

    def weights(self, dtype: Dtype = "fp32") -> Iterator[tuple[str, torch.Tensor]]:
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
        parameters = dict(merged_parameters(self._model))
        if is_main():
            self._model.save_pretrained(folder, state_dict=parameters)
