"""The precision modes of trainers for a loaded model, and its LoRA adapter: separate, as in trainers, or merged."""

import atexit
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from mismatch_probe.config.model import Attention, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, MissingExtra, UsageError, message_of
from mismatch_probe.provenance.stored_tensors import PREFIX, WEIGHTS, Adapter, read_adapter
from mismatch_probe.training_path.arithmetic import Arithmetic, is_16_bit, torch_dtype
from mismatch_probe.training_path.attention import AttentionChoice, choose_reference_attention, use_reference_kernels
from mismatch_probe.training_path.loading import SMALLER, load_config, load_model, maker_of
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.observation import ADAPTER_FACTS, require_as_asked
from mismatch_probe.training_path.rank_sharding import (
    is_sharded_after_loading,
    keep_own_module,
    loading_arguments,
    require_divisible,
    require_group,
    require_sharded,
)


def load_training_model(
    folder: Path, dtype: Dtype, settings: TrainingPathSettings, device: torch.device, *, trust_remote_code: bool
) -> tuple[PreTrainedModel, Arithmetic]:
    """pi: the model as `settings.precision` makes it, and the arithmetic to run it in."""
    if settings.precision == "fsdp" and settings.device_map is not None:
        raise UsageError("training.precision = fsdp places the weights itself; leave training.device_map unset")
    target = torch_dtype(dtype)
    at_load = target if settings.precision == "weights" or dtype == Dtype.FP64 else torch.float32
    model = _load_with_adapter(
        folder, at_load, settings, settings.attention, device, trust_remote_code=trust_remote_code
    )
    if settings.precision == "to":
        torch.nn.Module.to(model, target)
    if settings.lm_head_dtype is not None:
        _compute_head_in(model, torch_dtype(settings.lm_head_dtype))
    if settings.precision == "fsdp":
        _shard_model(model, MixedPrecisionPolicy(param_dtype=target, reduce_dtype=torch.float32), device)
    elif is_sharded_after_loading(model.config, settings):
        _shard_model(model, MixedPrecisionPolicy(), device)
    autocast_dtype = target if settings.precision == "autocast" and dtype.is_autocast_target else None
    return model, Arithmetic(dtype, model.device.type, autocast_dtype, is_reference=False)


def load_reference_model(
    folder: Path,
    dtype: Dtype,
    settings: TrainingPathSettings,
    device: torch.device,
    *,
    rounded_to: Dtype | None,
    trust_remote_code: bool,
    advice: str = SMALLER,
) -> tuple[PreTrainedModel, Arithmetic, AttentionChoice]:
    """The reference: `dtype` arithmetic on the stored weights, or on exactly those of pi in `rounded_to`.

    advice: what to do where its weights do not fit.
    """
    target = torch_dtype(dtype)
    rounding_dtype = None if rounded_to is None else torch_dtype(rounded_to)
    at_load = target if rounding_dtype is None or settings.num_ranks else rounding_dtype
    model = _load_with_adapter(
        folder, at_load, settings, "eager", device, trust_remote_code=trust_remote_code, is_expanded=True, advice=advice
    )
    if rounding_dtype is not None and settings.num_ranks:
        _round_in_place(model, rounding_dtype, trust_remote_code=trust_remote_code)
    use_reference_kernels(model)
    for parameter in model.parameters():
        if parameter.dtype != target:
            parameter.data = parameter.data.to(target)
    for buffer in model.buffers():
        if is_16_bit(buffer):
            buffer.data = buffer.data.to(target)
    if is_sharded_after_loading(model.config, settings):
        _shard_model(model, MixedPrecisionPolicy(), device)
    arithmetic = Arithmetic(dtype, model.device.type, autocast_dtype=None, is_reference=True)
    with memory_errors_named("trying the reference's attention on a short probe", advice):
        choice = choose_reference_attention(model, arithmetic)
    return model, arithmetic, choice


def _load_with_adapter(
    folder: Path,
    dtype: torch.dtype,
    settings: TrainingPathSettings,
    attention: Attention | None,
    device: torch.device,
    *,
    trust_remote_code: bool,
    is_expanded: bool = False,
    advice: str = SMALLER,
) -> PreTrainedModel:
    """The checkpoint with its parameters in `dtype`, and the unmerged adapter; merged, both are rounded once."""
    adapter = None if settings.adapter is None else read_adapter(Path(settings.adapter))
    config = load_config(folder, trust_remote_code=trust_remote_code)
    require_group(settings)
    require_divisible(folder, config, settings.tensor_parallel)
    model = load_model(
        folder,
        dtype=torch.promote_types(dtype, torch.float32) if settings.adapter_merged else dtype,
        attention=attention,
        device=torch.device("cpu") if is_sharded_after_loading(config, settings) else device,
        device_map=settings.device_map,
        trust_remote_code=trust_remote_code,
        is_expanded=is_expanded,
        advice=advice,
        sharding=loading_arguments(config, settings),
    )
    require_as_asked(folder, model, device, settings.offload, instead=advice if is_expanded else None)
    if not is_sharded_after_loading(config, settings):
        require_sharded(model, settings)
    keep_own_module(model)
    if adapter is not None:
        add_adapter(model, adapter)
    if settings.adapter_merged:
        merge_adapter(model)
        _round_parameters(model, dtype)
    return model


def _round_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters as loading in `dtype` does; some stay in FP32."""
    fp32_names: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in fp32_names):
            parameter.data = parameter.data.to(dtype)


def _round_in_place(model: PreTrainedModel, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
    """Round parameters and buffers to their values after loading in `dtype`, and keep their format and place.

    An empty model shows which buffers take that format; the scale of Gemma's embeddings does.
    """
    fp32_names: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    with torch.device("meta"):
        empty = maker_of(model.config).from_config(
            deepcopy(model.config), dtype=dtype, trust_remote_code=trust_remote_code
        )
    buffers = {name for name, buffer in empty.named_buffers() if buffer.dtype == dtype}
    tensors = chain(
        model.named_parameters(),
        (name_and_buffer for name_and_buffer in model.named_buffers() if name_and_buffer[0] in buffers),
    )
    with torch.no_grad():
        for name, tensor in tensors:
            if not any(part in name for part in fp32_names):
                tensor.copy_(tensor.to(dtype))


class HeadInDtype(torch.nn.Module):
    """A language-model head with untied weights and arithmetic of one format, whatever the body's format."""

    def __init__(self, head: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.dtype = dtype
        for name, parameter in list(head.named_parameters(recurse=False)):
            setattr(head, name, torch.nn.Parameter(parameter.detach().to(dtype, copy=True)))
        self.train(head.training)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            logits: torch.Tensor = self.head(states.to(self.dtype))
        return logits


def _compute_head_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    head = model.get_output_embeddings()
    if head is None:
        raise EngineError(
            f"{type(model).__name__} does not say which module is its head, so training.lm_head_dtype cannot be "
            "applied; leave training.lm_head_dtype unset"
        )
    model.set_output_embeddings(HeadInDtype(head, dtype))


def _shard_model(model: PreTrainedModel, policy: MixedPrecisionPolicy, device: torch.device) -> None:
    """Apply FSDP2 to every decoder layer and the rest, in the present process group or one of this process alone."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(leave_process_group)
    sharding: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    for layer in undivided_modules(model):
        fully_shard(layer, mp_policy=policy, **sharding)
    head = model.get_output_embeddings()
    if isinstance(head, HeadInDtype):
        fully_shard(head, mp_policy=MixedPrecisionPolicy(param_dtype=head.dtype), **sharding)
    fully_shard(model, mp_policy=policy, **sharding)


def leave_process_group() -> None:
    """Destroy the process group, unless an engine in the same process has done so."""
    if dist.is_initialized():
        dist.destroy_process_group()


def undivided_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that transformers does not split; they are the layers that trainers wrap."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise EngineError(
            f"{type(model).__name__} does not say which modules are its layers, so training.precision = fsdp cannot "
            "wrap them; set training.precision to autocast or weights"
        )
    return layers


_NAME: Final = "default"


def add_adapter(model: PreTrainedModel, adapter: Adapter) -> None:
    """Put the adapter's matrices beside the model's linear layers, in the format that each layer's weights have.

    Raises:
        MissingExtra: peft is not installed.
        UsageError: the adapter is of another model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError as error:
        raise MissingExtra(
            "training.adapter needs the package peft, which is not installed; run `pip install 'mismatch-probe[lora]'`"
        ) from error
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(adapter.folder / WEIGHTS).items()}
    config = LoraConfig(target_modules=adapter.names, **adapter.scale)
    try:
        inject_adapter_in_model(config, model, adapter_name=_NAME, state_dict=tensors)
        outcome: Any = set_peft_model_state_dict(model, tensors, adapter_name=_NAME)
    except (ValueError, RuntimeError, KeyError) as error:
        raise _adapter_misfit(adapter, message_of(error)) from error
    homeless = [*outcome.unexpected_keys, *(name for name in outcome.missing_keys if ".lora_" in name)]
    if homeless:
        raise _adapter_misfit(adapter, f"{homeless[0]} has no place in it")
    num_adapted = len(list(_adapted_layers(model)))
    if num_adapted != len(adapter.modules):
        raise _adapter_misfit(adapter, f"it has {num_adapted} of the {len(adapter.modules)} modules")
    model.requires_grad_(False).train(model.training)
    setattr(model, ADAPTER_FACTS, {**adapter.facts(), "merged": False, **_adapter_size(model)})


@torch.no_grad()
def merge_adapter(model: PreTrainedModel) -> None:
    """Replace every adapted weight W by W + scale B A in its own format, and remove the adapter."""
    for parent, name, layer in list(_adapted_layers(model)):
        layer.merge(adapter_names=[_NAME])
        setattr(parent, name, layer.get_base_layer())
    delattr(model, "peft_config")
    getattr(model, ADAPTER_FACTS)["merged"] = True


@torch.no_grad()
def _adapter_size(model: PreTrainedModel) -> dict[str, Any]:
    squares, modules = 0.0, 0
    for _, _, layer in _adapted_layers(model):
        a_RK, b_NR = (getattr(layer, part)[_NAME].weight.double() for part in ("lora_A", "lora_B"))
        squares += float(((b_NR.T @ b_NR) * (a_RK @ a_RK.T)).sum()) * layer.scaling[_NAME] ** 2
        modules += 1
    return {"num_modules": modules, "change_norm": squares**0.5}


def _adapted_layers(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Each adapted layer with the module that holds it and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if hasattr(child, "lora_A"):
                yield parent, name, child


def _adapter_misfit(adapter: Adapter, why: str) -> UsageError:
    return UsageError(
        f"the adapter {adapter.folder} does not fit the model ({why}); give training.adapter one of this checkpoint"
    )
