"""A checkpoint's model in training: FP32 master weights, computed in another dtype by FSDP2, on one process or many."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.adapters import add_adapters
from mismatch_probe.train.distributed import world_size
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.batching import pad_batch, require_scorable
from mismatch_probe.training_path.loading import choose_device, load_model
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.precision import undivided_modules
from mismatch_probe.training_path.prefixes import StateBatch, share_prefixes
from mismatch_probe.training_path.products import CpuProducts, fp32_by_onednn
from mismatch_probe.training_path.shared_attention import can_share_prefixes

Module = TypeVar("Module", bound=torch.nn.Module)


class ShardedModel(Generic[Module]):
    """What is trained, in the process group at hand.

    Parameters are FP32; products, activations and their gradients are in `dtype`. `module` computes a padded batch.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Dtype,
        settings: PolicySettings,
        wrap: Callable[[PreTrainedModel], Module],
        *,
        trust_remote_code: bool,
        seed: int,
    ) -> None:
        """`wrap` makes `module` from the checkpoint's model with its adapters, on the host; sharding moves each part.

        Raises:
            UsageError: the checkpoint or the device cannot be used.
            MissingExtra: adapters are asked for and peft is not installed.
            OutOfMemory: the weights do not fit.
        """
        self.dtype = dtype
        self.device = choose_device(settings.device)
        self._micro_batch_tokens = settings.micro_batch_tokens
        model = load_model(
            folder,
            dtype=torch.float32,
            attention=settings.attention,
            device=torch.device("cpu"),
            device_map=None,
            trust_remote_code=trust_remote_code,
        )
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]
        self.shares_prefixes = can_share_prefixes(model)
        layers = undivided_modules(model)
        if settings.lora is not None:
            add_adapters(model, settings.lora, seed=seed)
        if settings.gradient_checkpointing:
            _checkpoint_gradients(model)
        self.module = wrap(model)
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

    def computing(self) -> AbstractContextManager[Any]:
        """Enter it around forward and backward passes: products on a CPU follow `training_path.products`.

        It costs time at every operator, so it is entered only where it changes one: of BF16 in the backward pass alone,
        of FP32 nowhere unless that goes to oneDNN.
        """
        if self.device.type != "cpu" or not self._has_own_products():
            return nullcontext()
        return CpuProducts()

    def _has_own_products(self) -> bool:
        if self.dtype == Dtype.BF16:
            return torch.is_grad_enabled()
        return self.dtype != Dtype.FP32 or fp32_by_onednn()

    def _compute(self, sequences: list[TokenSequence]) -> Any:
        """What `module` makes of a micro-batch, with a gradient where one is wanted.

        Raises:
            UsageError: a sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: it does not fit.
        """
        for sequence in sequences:
            require_scorable(sequence, self._vocab_size)
        longest = max(sequence.num_tokens for sequence in sequences)
        with memory_errors_named(
            f"computing {len(sequences)} sequences of up to {longest} tokens",
            f"halve policy.micro_batch_tokens (now {self._micro_batch_tokens}), or set policy.gradient_checkpointing",
        ):
            computed = self.module(self._laid_out(sequences))
        if not torch.is_grad_enabled():
            # FSDP keeps its root gathered in `dtype` for a backward pass, and until then that is what parameters read.
            cast(FSDPModule, self.module).reshard()
        return computed

    def _laid_out(self, sequences: list[TokenSequence]) -> StateBatch:
        if self.shares_prefixes:
            return share_prefixes(sequences)
        return StateBatch.padded(pad_batch(sequences, vocab_size=self._vocab_size))


def _checkpoint_gradients(model: PreTrainedModel) -> None:
    """Compute each layer's activations again in the backward pass.

    Only the modules that do so are told that they train: dropout stays off, as it is when mu samples.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False) is True
