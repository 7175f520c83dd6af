"""Computes a part of a 16-bit model in FP32, to measure what that changes.

The part computes in FP32 from its 16-bit inputs and weights, and its result is rounded once. Where the part is the
logits or the residual stream, the result stays in FP32.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mismatch_probe.records.sequences import is_layer, is_router
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
