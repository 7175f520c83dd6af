"""Low-rank adapters (peft) inside the policy."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from mismatch_probe.config.train import LoraSettings
from mismatch_probe.errors import MissingExtra, UsageError

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
            "policy.lora needs the package peft, which is not installed; run pip install 'mismatch-probe[lora]'"
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
            raise UsageError(f"policy.lora cannot be applied ({error}); mend policy.lora.target_modules") from error


def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Each FP32 parameter whole, W + (alpha / r) B A where it has an adapter, under the name it has without one.

    Every rank must go through it to the end. Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """
    adapters: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "lora_A"):
            adapted: Any = module
            adapters[id(getattr(adapted.get_base_layer(), getattr(adapted, "parameter_name", "weight")))] = adapted
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = whole(parameter)
        if id(parameter) in adapters:
            weight = weight + _change(adapters[id(parameter)], weight)
        yield name.replace(_INNER, ""), weight
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            yield name.replace(_INNER, ""), whole(buffer)


def _change(adapted: Any, weight: torch.Tensor) -> torch.Tensor:
    """What an adapter adds to its weight: a matrix, or one for each expert, whose parts peft lays side by side."""
    a_RK, b_NR = (whole(getattr(adapted, part)[_NAME].weight) for part in ("lora_A", "lora_B"))
    scaling: float = adapted.scaling[_NAME]
    if weight.dim() == 2:
        return (b_NR @ a_RK) * scaling
    num_experts = weight.shape[0]
    a_ERK = a_RK.unflatten(0, (num_experts, -1))
    b_NRE = b_NR.unflatten(1, (-1, num_experts))
    takes_inputs_first = getattr(adapted.get_base_layer(), "is_transposed", False)
    pattern = "nre,erk->ekn" if takes_inputs_first else "nre,erk->enk"
    return torch.einsum(pattern, b_NRE, a_ERK) * scaling


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A sharded parameter gathered from every rank."""
    from torch.distributed.tensor import DTensor

    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
