"""Computes a part of a 16-bit model, or chosen modules, in FP32, to measure what that changes.

The part computes in FP32 from its 16-bit inputs and weights, and its result is rounded once. Where the part is the
logits or the residual stream, the result stays in FP32.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.activations import is_layer, is_router
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.loading import choose_device, load_model
from mismatch_probe.training_path.precision import undivided_modules


def let_layer_norms_widen(model: torch.nn.Module) -> list[Callable[[], object]]:
    """Make every LayerNorm compute in the format of its input; returns what undoes that."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    for norm in norms:
        vars(norm)["forward"] = partial(_widened_norm, norm)
    return [partial(vars(norm).pop, "forward") for norm in norms]


def _widened_norm(norm: torch.nn.LayerNorm, states: Tensor) -> Tensor:
    weight, bias = (None if parameter is None else parameter.to(states.dtype) for parameter in (norm.weight, norm.bias))
    return layer_norm(states, norm.normalized_shape, weight, bias, norm.eps)


LM_HEAD: Final = "lm_head"
NORMS: Final = "norms"
ROPE: Final = "rope"
ATTENTION: Final = "attention"
ROUTER: Final = "router"
RESIDUAL: Final = "residual stream"
EVERYTHING: Final = "everything"


def model_parts(model: PreTrainedModel) -> list[str]:
    """The parts of this model that can compute in FP32; the single layers come last."""
    parts = [LM_HEAD, RESIDUAL, NORMS, ATTENTION]
    if _rotary_modules(model):
        parts.append(ROPE)
    if _routers(model):
        parts.append(ROUTER)
    return [*parts, *(f"layer {number}" for number in range(len(undivided_modules(model))))]


@contextmanager
def model_part_in_fp32(model: PreTrainedModel, part: str) -> Iterator[int]:
    """Compute `part` in FP32 inside the block; gives the additional bytes of its FP32 weights."""
    with ExitStack() as stack:
        yield _PARTS[part](model, stack) if part in _PARTS else _raise_layer(model, part, stack)


def _raise_layer(model: PreTrainedModel, part: str, stack: ExitStack) -> int:
    if not is_layer(part):
        raise ValueError(f"{part!r} is no part that can compute in FP32")
    return _raise_module(undivided_modules(model)[int(part.removeprefix("layer "))], stack)


def _raise_residual(model: PreTrainedModel, stack: ExitStack) -> int:
    """Keep the sum of all layers' contributions in FP32; its readers get it rounded to 16 bits."""
    dtype = model.dtype
    for undo in let_layer_norms_widen(model):
        stack.callback(undo)
    _hook_output(model.get_input_embeddings(), stack, torch.float32)
    for norm in _norm_modules(model):
        _hook_output(norm, stack, dtype)
    for rotary in _rotary_modules(model):
        _hook_input(rotary, stack, dtype)
    return 0


def _raise_rope(model: PreTrainedModel, stack: ExitStack) -> int:
    """Compute cosines, sines and the rotation in FP32, and round queries and keys afterwards."""
    for rotary in _rotary_modules(model):
        _hook_input(rotary, stack, torch.float32)
    module = sys.modules[type(model).__module__]
    rotate = vars(module)["apply_rotary_pos_emb"]

    def in_fp32(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotations = rotate(query.float(), key.float(), cos, sin, *args, **kwargs)
        return tuple(tensor.to(query.dtype) for tensor in rotations)

    vars(module)["apply_rotary_pos_emb"] = in_fp32
    stack.callback(vars(module).__setitem__, "apply_rotary_pos_emb", rotate)
    return 0


def _raise_attention(model: PreTrainedModel, stack: ExitStack) -> int:
    """Compute scores, softmax and the weighted sum in FP32 from 16-bit queries, keys and values."""
    name = model.config.get_text_config()._attn_implementation
    registered_function = ALL_ATTENTION_FUNCTIONS.get(name)

    def in_fp32(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        function = registered_function or sys.modules[type(module).__module__].eager_attention_forward
        output, weights = function(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return output.to(query.dtype), weights

    mapped_function = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = in_fp32
    if mapped_function is None:
        stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, name)
    else:
        stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, name, mapped_function)
    return 0


_PARTS: Final[dict[str, Callable[[PreTrainedModel, ExitStack], int]]] = {
    LM_HEAD: lambda model, stack: _raise_module(model.get_output_embeddings(), stack, keep_output=True),
    NORMS: lambda model, stack: sum(_raise_module(norm, stack) for norm in _norm_modules(model)),
    ROPE: _raise_rope,
    ATTENTION: _raise_attention,
    ROUTER: lambda model, stack: sum(_raise_module(router, stack) for router in _routers(model)),
    RESIDUAL: _raise_residual,
    EVERYTHING: lambda model, stack: _raise_module(model, stack, keep_output=True),
}
"""`EVERYTHING` is the whole model in FP32 on its 16-bit weights: all that this side's arithmetic can be blamed for."""


def _raise_module(module: Any, stack: ExitStack, *, keep_output: bool = False) -> int:
    """Compute a module in FP32 and round its output, unless `keep_output`; returns the bytes of the copies."""
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)
    extra_bytes = 0
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            raised_parameter = torch.nn.Parameter(parameter.detach().float(), requires_grad=False)
            extra_bytes += raised_parameter.numel() * 4
            setattr(owner, name, raised_parameter)
            stack.callback(setattr, owner, name, parameter)
    _hook_input(module, stack, torch.float32)
    if not keep_output and dtype is not None:
        _hook_output(module, stack, dtype)
    return extra_bytes


def _hook_input(module: torch.nn.Module, stack: ExitStack, dtype: torch.dtype) -> None:
    def widen_inputs(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _to_dtype(args, dtype), _to_dtype(kwargs, dtype)

    stack.callback(module.register_forward_pre_hook(widen_inputs, with_kwargs=True).remove)


def _hook_output(module: Any, stack: ExitStack, dtype: torch.dtype) -> None:
    stack.callback(module.register_forward_hook(lambda _, args, output: _to_dtype(output, dtype)).remove)


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in tuples and dicts; a boolean mask stays boolean."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_to_dtype(item, dtype) for item in value)
    if type(value) is dict:
        return {name: _to_dtype(item, dtype) for name, item in value.items()}
    return value


def _norm_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Norm")]


def _rotary_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]


def _routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for layer in undivided_modules(model) for path, module in layer.named_modules() if is_router(path)]


def load_in_format(
    folder: Path, dtype: Dtype, settings: HeadroomSettings, *, attention: str | None = None
) -> PreTrainedModel:
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
