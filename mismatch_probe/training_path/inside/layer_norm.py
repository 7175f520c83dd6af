"""LayerNorm, which unlike the norms that models bring themselves refuses an input wider than its weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import layer_norm


def let_layer_norms_widen(model: torch.nn.Module) -> list[Callable[[], object]]:
    """Let every LayerNorm compute in the format of what it is given; what undoes that."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    for norm in norms:
        vars(norm)["forward"] = partial(_forward, norm)
    return [partial(vars(norm).pop, "forward") for norm in norms]


def _forward(norm: torch.nn.LayerNorm, hidden: Tensor) -> Tensor:
    weight, bias = (None if parameter is None else parameter.to(hidden.dtype) for parameter in (norm.weight, norm.bias))
    return layer_norm(hidden, norm.normalized_shape, weight, bias, norm.eps)
