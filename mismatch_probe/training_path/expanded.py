"""Quantised weights in high precision: asked for as the checkpoint is read, and looked for on the model itself."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.quantization import stored_quantization

_PACKED: Final = (torch.uint8, torch.int8, torch.int16, torch.int32)
_REPLACING: Final = ("transformers.integrations.", "torch.ao.", "torchao.", "bitsandbytes.", "gptqmodel.", "awq.")
"""Modules of these packages stand in the place of those whose weights they hold quantised."""


def ask_for_expansion(config: PreTrainedConfig) -> None:
    """Have transformers multiply the stored weights with their scales at load, where it can for the checkpoint's
    method. On a CPU it does so by itself; on a GPU it would multiply in FP8.
    """
    stored: Any = getattr(config, "quantization_config", None)
    method = str(stored.get("quant_method")) if isinstance(stored, dict) else ""
    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if known is not None and "dequantize" in inspect.signature(known).parameters:
        stored["dequantize"] = True


def require_expanded(folder: Path, model: PreTrainedModel) -> None:
    """
    Raises:
        UsageError: the model holds quantised or packed weights, with which a reference would carry their error.
    """
    if stored_quantization(folder) is None:
        return
    places = [place for name, module in model.named_modules() for place in _quantised_places(name, module)]
    if places:
        raise UsageError(
            f"transformers keeps the weights of {folder} quantised, so that a reference would compute with them as "
            f"they are packed ({len(places)} places, such as {places[0]}); give the training side the checkpoint that "
            "was quantised (--train NAME:checkpoint=...), or --reference none"
        )


def _quantised_places(name: str, module: torch.nn.Module) -> Iterator[str]:
    kind = type(module)
    if kind.__module__.startswith(_REPLACING):
        yield f"{name}, a {kind.__name__}"
    for own, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
            yield f"{name}.{own} in {parameter.dtype}"
    for own, buffer in module.named_buffers(recurse=False):
        if buffer.dtype in _PACKED or (buffer.is_floating_point() and buffer.dtype.itemsize == 1):
            yield f"{name}.{own} in {buffer.dtype}"
