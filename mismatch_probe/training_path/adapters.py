"""A saved LoRA adapter in the training path: beside the weights, as trainers keep it, or merged into them."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mismatch_probe.errors import MissingExtra, UsageError, said
from mismatch_probe.provenance.stored_tensors import PREFIX, WEIGHTS, Adapter

_NAME: Final = "default"
_FACTS: Final = "_adapter_facts"


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
            "training.adapter needs the package peft, which is not installed; run pip install 'mismatch-probe[lora]'"
        ) from error
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(adapter.folder / WEIGHTS).items()}
    config = LoraConfig(target_modules=adapter.names, **adapter.scale)
    try:
        inject_adapter_in_model(config, model, adapter_name=_NAME, state_dict=tensors)
        outcome: Any = set_peft_model_state_dict(model, tensors, adapter_name=_NAME)
    except (ValueError, RuntimeError, KeyError) as error:
        raise _misfit(adapter, said(error)) from error
    homeless = [*outcome.unexpected_keys, *(name for name in outcome.missing_keys if ".lora_" in name)]
    if homeless:
        raise _misfit(adapter, f"{homeless[0]} has no place in it")
    num_adapted = len(list(_adapted(model)))
    if num_adapted != len(adapter.modules):
        raise _misfit(adapter, f"it has {num_adapted} of the {len(adapter.modules)} modules")
    model.requires_grad_(False).train(model.training)
    setattr(model, _FACTS, {**adapter.facts(), "merged": False, **_applied(model)})


@torch.no_grad()
def merge_adapter(model: PreTrainedModel) -> None:
    """Replace every adapted weight W by W + scale B A, in its own format, and take the adapter out."""
    for parent, name, layer in list(_adapted(model)):
        layer.merge(adapter_names=[_NAME])
        setattr(parent, name, layer.get_base_layer())
    delattr(model, "peft_config")
    getattr(model, _FACTS)["merged"] = True


def adapter_facts(model: PreTrainedModel) -> dict[str, Any] | None:
    """The adapter that the model computes with, None where it has none.

    `change_norm` is the Frobenius norm over all layers of what it adds to the weights, scale B A, as it was loaded.
    """
    facts: dict[str, Any] | None = getattr(model, _FACTS, None)
    return facts


@torch.no_grad()
def _applied(model: PreTrainedModel) -> dict[str, Any]:
    squares, modules = 0.0, 0
    for _, _, layer in _adapted(model):
        a_RK, b_NR = (getattr(layer, part)[_NAME].weight.double() for part in ("lora_A", "lora_B"))
        squares += float(((b_NR.T @ b_NR) * (a_RK @ a_RK.T)).sum()) * layer.scaling[_NAME] ** 2
        modules += 1
    return {"num_modules": modules, "change_norm": squares**0.5}


def _adapted(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Each adapted layer with the module that holds it and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if hasattr(child, "lora_A"):
                yield parent, name, child


def _misfit(adapter: Adapter, why: str) -> UsageError:
    return UsageError(
        f"the adapter {adapter.folder} does not fit the model ({why}); give training.adapter one of this checkpoint"
    )
