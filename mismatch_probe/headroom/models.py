"""The model in 16 bits, with chosen modules in FP32."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.inside.fp32_parts import let_layer_norms_widen
from mismatch_probe.training_path.loading import choose_device, load_model
from mismatch_probe.training_path.precision import undivided_modules


def load(folder: Path, dtype: Dtype, settings: HeadroomSettings, *, attention: str | None = None) -> PreTrainedModel:
    """The checkpoint in a format, parameters and all; raises as `load_model`."""
    return load_model(
        folder,
        dtype=torch_dtype(dtype),
        attention=attention or settings.attention,
        device=choose_device(settings.device),
        device_map=None,
        trust_remote_code=settings.model.trust_remote_code,
    )


def layer_names(model: PreTrainedModel) -> list[str]:
    """Names of the decoder layers, in order."""
    layers = set(map(id, undivided_modules(model)))
    return [name for name, module in model.named_modules() if id(module) in layers]


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of token ids the model has embeddings for."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def fp32_module(model: PreTrainedModel, module: str) -> str:
    """The module that has to compute in FP32 so that what `module` computes does.

    Inside attention that is the whole attention, whose parts must agree on a format; for what the model itself does to
    its embeddings, the embeddings; for a decoder layer's own additions the layer, which then means its residual stream.
    """
    path = module.split(".")
    for length in range(1, len(path) + 1):
        name = ".".join(path[:length])
        if "attention" in type(model.get_submodule(name)).__name__.lower():
            return name
    if model.get_submodule(module) in (model, model.base_model):
        embeddings = model.get_input_embeddings()
        return next((name for name, module in model.named_modules() if module is embeddings), module)
    return module


def outermost(modules: Iterable[str]) -> list[str]:
    """The modules, by name, that do not lie inside another of them."""
    names = set(modules)
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def raise_to_fp32(
    model: PreTrainedModel, reference: PreTrainedModel, modules: Iterable[str], residual_from: str | None
) -> None:
    """Let modules of a 16-bit model take FP32 inputs, compute in FP32 on the stored weights and answer in FP32.

    The layer `residual_from` takes its hidden states in FP32, which makes the residual stream from there on FP32.
    What multiplies by 16-bit matrices has its inputs rounded to 16 bits, and so have rotations, which would take their
    format from embeddings in FP32; norms and additions compute in the wider format of what they are given.
    """
    low = next(model.parameters()).dtype
    for name in modules:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(_casting_inputs(torch.float32), with_kwargs=True)
        _take_parameters(module, reference.get_submodule(name))
    if residual_from is not None:
        model.get_submodule(residual_from).register_forward_pre_hook(_casting_first_input(torch.float32))
    let_layer_norms_widen(model)
    in_fp32 = {id(part) for name in modules for part in model.get_submodule(name).modules()}
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.dtype == low]
        is_matrix = any(parameter.dim() > 1 for parameter in own) and not isinstance(module, torch.nn.Embedding)
        is_rotation = type(module).__name__.endswith("RotaryEmbedding") and id(module) not in in_fp32
        if is_matrix or is_rotation:
            module.register_forward_pre_hook(_casting_inputs(low), with_kwargs=True)


def _take_parameters(module: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Parameters of their own, untied from what else uses them."""
    sources = dict(reference.named_modules())
    for name, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            parameter_of_reference = getattr(sources[name], key).detach()
            setattr(
                part,
                key,
                torch.nn.Parameter(parameter_of_reference.to(torch.float32, copy=True), parameter.requires_grad),
            )


def _casting_first_input(dtype: torch.dtype) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        return args[0].to(dtype), *args[1:]

    return hook


def _casting_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return tuple(map(cast, value)) if isinstance(value, tuple) else value

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cast(args), {name: cast(value) for name, value in kwargs.items()}

    return hook
