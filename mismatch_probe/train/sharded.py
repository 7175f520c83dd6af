"""Models in training: FP32 master weights, computed in another dtype by FSDP2, whole or as adapters."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from mismatch_probe.config.train import LoraSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.distributed import world_size
from mismatch_probe.training_path.arithmetic import CpuProducts, fp32_by_onednn, has_native_bf16, torch_dtype
from mismatch_probe.training_path.batching import pad_batch, require_scorable
from mismatch_probe.training_path.loading import choose_device, load_model
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.precision import undivided_modules
from mismatch_probe.training_path.prefixes import StateBatch, can_share_prefixes, share_prefixes

_NAME = "default"
_INNER = ".base_layer"


def add_adapters(model: PreTrainedModel, settings: LoraSettings, *, seed: int) -> None:
    """Freeze the model and put adapters, the same on every rank, beside its linear layers and experts.

    Raises:
        MissingExtra: peft is not installed.
        UsageError: the model has no module of the names asked for.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra(
            "policy.lora needs the package peft, which is not installed; run `pip install 'mismatch-probe[lora]'`"
        ) from error
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:
            raise UsageError(f"policy.lora cannot be applied ({error}); fix policy.lora.target_modules") from error


def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Each FP32 parameter whole, W + (alpha / r) B A where it has an adapter, under the name it has without one.

    Every rank must go through it to the end. Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """
    adapters: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            adapters[id(getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight")))] = layer
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = full_tensor_of(parameter)
        if id(parameter) in adapters:
            weight = weight + _adapter_change(adapters[id(parameter)], weight)
        yield name.replace(_INNER, ""), weight
    names = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in names:
            yield name.replace(_INNER, ""), full_tensor_of(buffer)


def _adapter_change(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """What an adapter adds to its weight: a matrix, or one for each expert, whose parts peft lays side by side."""
    a_RK, b_NR = (full_tensor_of(getattr(layer, part)[_NAME].weight) for part in ("lora_A", "lora_B"))
    scaling: float = layer.scaling[_NAME]
    if weight.dim() == 2:
        return (b_NR @ a_RK) * scaling
    num_experts = weight.shape[0]
    a_ERK = a_RK.unflatten(0, (num_experts, -1))
    b_NRE = b_NR.unflatten(1, (-1, num_experts))
    takes_inputs_first = getattr(layer.get_base_layer(), "is_transposed", False)
    pattern = "nre,erk->ekn" if takes_inputs_first else "nre,erk->enk"
    return torch.einsum(pattern, b_NRE, a_ERK) * scaling


def full_tensor_of(parameter: torch.Tensor) -> torch.Tensor:
    """A sharded parameter gathered from every rank."""
    from torch.distributed.tensor import DTensor

    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
        """`wrap` makes `module` from the checkpoint's model with its adapters, on the host; sharding moves each."""
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
        """Enter it around forward and backward passes: products on a CPU follow `training_path.arithmetic`.

        It costs time at every operator, so it is entered only where it changes one: of BF16 in the backward pass alone
        where the processor has BF16 products, of FP32 nowhere unless that goes to oneDNN.
        """
        if self.device.type != "cpu" or not self._has_own_products():
            return nullcontext()
        return CpuProducts()

    def _has_own_products(self) -> bool:
        if self.dtype == Dtype.BF16:
            return torch.is_grad_enabled() or not has_native_bf16()
        return self.dtype != Dtype.FP32 or fp32_by_onednn()

    def _forward_batch(self, sequences: list[TokenSequence], **options: bool) -> Any:
        """What `module` makes of a micro-batch with these options, with a gradient where one is wanted."""
        for sequence in sequences:
            require_scorable(sequence, self._vocab_size)
        longest = max(sequence.num_tokens for sequence in sequences)
        with memory_errors_named(
            f"computing {len(sequences)} sequences of up to {longest} tokens",
            f"halve policy.micro_batch_tokens (now {self._micro_batch_tokens}), or set policy.gradient_checkpointing",
        ):
            states = self.module(self._state_batch(sequences), **options)
        if not torch.is_grad_enabled():
            # FSDP keeps its root gathered in `dtype` for a backward pass, and until then that is what parameters read.
            cast(FSDPModule, self.module).reshard()
        return states

    def _state_batch(self, sequences: list[TokenSequence]) -> StateBatch:
        if self.shares_prefixes:
            return share_prefixes(sequences)
        return StateBatch.padded(pad_batch(sequences, vocab_size=self._vocab_size))


def _checkpoint_gradients(model: PreTrainedModel) -> None:
    """Compute each layer's activations again in the backward pass.

    Only the modules that do so are set to training mode: dropout stays off, as it is when mu samples.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False) is True


class TokenValues(torch.nn.Module):
    """What is expected to be earned, at the states in which response tokens are chosen.

    The head starts at zero: before any learning no state is worth more than another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = model.base_model
        hidden_size = model.config.get_text_config().hidden_size
        self.head_D = torch.nn.Parameter(torch.zeros(hidden_size, device=model.device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=model.device))

    def forward(self, batch: StateBatch) -> torch.Tensor:
        """Values [T] of the states before the batch's response tokens; the head's product is in FP32."""
        device = self.head_D.device
        hidden_BSD = self.body(**batch.model_inputs(device), use_cache=False).last_hidden_state
        hidden_QD = hidden_BSD.flatten(0, 1)[batch.states_Q.to(device)]
        values_Q: torch.Tensor = hidden_QD.float() @ self.head_D.float() + self.bias.float()
        return values_Q[batch.questions_T.to(device)]


class ValueModel(ShardedModel[TokenValues]):
    """Computed as the policy is; adapters, where asked for, are in its body, beside a head that is trained whole."""

    def __init__(
        self, folder: Path, dtype: Dtype, settings: PolicySettings, *, trust_remote_code: bool = False, seed: int = 0
    ) -> None:
        super().__init__(folder, dtype, settings, TokenValues, trust_remote_code=trust_remote_code, seed=seed)

    def expect(self, reward: float) -> None:
        """Where nothing has been learnt yet, value every state at `reward`.

        What the first gradients then tell the body is how states differ. From values of zero they would all ask it for
        more of the same, for as long as the mean takes to be reached, until it says the same of every state.
        """
        with torch.no_grad():
            if not bool(full_tensor_of(self.module.head_D).any()):
                self.module.bias.fill_(reward)

    def values(self, sequences: list[TokenSequence]) -> torch.Tensor:
        """The values of the response tokens [T] of a micro-batch, with a gradient where one is wanted."""
        values_T: torch.Tensor = self._forward_batch(sequences)
        return values_T
