"""What really runs: formats, kernels and flags read back from a loaded model and from a forward pass."""

from collections import Counter
from typing import Any, Final

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.training_path.adapters import adapter_facts
from mismatch_probe.training_path.arithmetic import Arithmetic, product_flags
from mismatch_probe.training_path.loading import sdpa_leaves_out
from mismatch_probe.training_path.placement import placement
from mismatch_probe.training_path.products import fp32_by_onednn
from mismatch_probe.training_path.rope import follows_length_beyond
from mismatch_probe.verdict.preflight.facts import forward_facts

aten = torch.ops.aten
_GROUPED: Final = aten._grouped_mm.default
_PRODUCTS: Final = (aten.mm.default, aten.addmm.default, aten.bmm.default, _GROUPED)


class ProductFormats(TorchDispatchMode):
    """Counts the multiplications of the matrix products it sees by the format of their inputs.

    `grouped` are those of experts in one kernel, which autocast does not reach; they are among `multiplications` too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiplications: Counter[str] = Counter()
        self.grouped: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            left = args[1] if func is aten.addmm.default else args[0]
            counted = {short_name(left.dtype): result.numel() * left.shape[-1]}
            self.multiplications.update(counted)
            if func is _GROUPED:
                self.grouped.update(counted)
        return result

    @property
    def prevailing(self) -> str:
        """The format most multiplications took."""
        return self.multiplications.most_common(1)[0][0]

    @property
    def prevailing_outside_experts(self) -> str:
        """The format most multiplications took that were not grouped by expert."""
        return (self.multiplications - self.grouped).most_common(1)[0][0]

    @property
    def prevailing_in_experts(self) -> str | None:
        """The format most multiplications took that were; None where there were none."""
        return self.grouped.most_common(1)[0][0] if self.grouped else None


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Parameters and buffers by format, the attention and expert code in use, whether dropout can act."""
    parameter_formats: Counter[str] = Counter()
    for parameter in model.parameters():
        parameter_formats[short_name(parameter.dtype)] += parameter.numel()
    buffers = {name: short_name(buffer.dtype) for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    rotary = {form for name, form in buffers.items() if name.endswith("inv_freq")}
    config = model.config.get_text_config()
    return {
        "architecture": type(model).__name__.removeprefix("FSDP"),
        "num_parameters": sum(parameter_formats.values()),
        "parameter_dtypes": dict(parameter_formats),
        "buffer_dtypes": buffers,
        "rope_inv_freq_dtype": "/".join(sorted(rotary)) or None,
        "rope_follows_length_beyond": follows_length_beyond(model),
        "attention": config._attn_implementation,
        "sdpa_leaves_out": sdpa_leaves_out(model.config),
        "experts": getattr(config, "_experts_implementation", None),
        "config": forward_facts(config.to_dict()),
        "dropout": "on" if any(module.training for module in model.modules()) else "off",
        "device": "/".join(sorted({str(parameter.device) for parameter in model.parameters()})),
        "device_map": placement(model),
        "adapter": adapter_facts(model),
    }


def describe_arithmetic(arithmetic: Arithmetic) -> dict[str, Any]:
    """Flags as they are while `arithmetic` is active, and the versions at work."""
    with arithmetic.active():
        flags = product_flags()
    defines_fp16 = arithmetic.dtype == Dtype.FP16 and arithmetic.defines_cpu_products
    return {
        **flags,
        "autocast_dtype": None if arithmetic.autocast_dtype is None else short_name(arithmetic.autocast_dtype),
        "fp16_products": "accumulated in fp32 and rounded once" if defines_fp16 else "native",
        "fp32_products_by_onednn": arithmetic.device_type == "cpu" and fp32_by_onednn(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
