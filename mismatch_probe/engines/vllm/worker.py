"""What runs inside each vLLM worker, called by name through `collective_rpc`: no function is pickled."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

from mismatch_probe.engines.vllm.adapters import ServedAdapter
from mismatch_probe.engines.vllm.cpu_worker import compute_eagerly, spare_discarded_draws
from mismatch_probe.engines.vllm.fp32_hooks import Fp32Hooks
from mismatch_probe.engines.vllm.held_weights import HeldWeights
from mismatch_probe.engines.vllm.hooks import ActivationHooks
from mismatch_probe.engines.vllm.packing import pack_again
from mismatch_probe.engines.vllm.routing_hooks import RoutingHooks

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER_EXTENSION: Final = f"{__name__}.ProbeWorker"


class ProbeWorker(ActivationHooks, Fp32Hooks, HeldWeights, RoutingHooks, ServedAdapter):
    """Methods vLLM mixes into its worker class (`worker_extension_cls`), whose attributes are declared here."""

    model_runner: Any
    vllm_config: Any
    device: Any
    use_v2_model_runner: bool

    def probe_prepare(self) -> None:
        """What a worker needs before its first request."""
        if torch.device(self.device).type == "cpu" and not self.use_v2_model_runner:
            spare_discarded_draws(self.model_runner)
            if self.vllm_config.model_config.enforce_eager:
                compute_eagerly(self.model_runner)

    def probe_scale_logits(self, temperature: float) -> None:
        """Divide every logit by `temperature` before anything reads it; 1 restores the model.

        vLLM's prompt log-probs carry no temperature. Decoding converts logits to FP32, then divides; so does this.
        """
        model = self.get_model()
        vars(model).pop("compute_logits", None)
        if temperature == 1.0:
            return
        compute_logits = model.compute_logits

        def scaled_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute_logits(*args, **kwargs)
            if logits is None:
                return None
            return logits.to(torch.float32) / torch.full((1,), temperature, dtype=torch.float32, device=logits.device)

        model.compute_logits = scaled_logits

    def probe_repack(self) -> None:
        """Pack again for a CPU what `reload_weights` leaves out."""
        if torch.device(self.device).type == "cpu":
            pack_again(self.get_model())

    def probe_describe(self) -> dict[str, Any]:
        """What this worker really holds and runs, as plain values."""
        model = self.get_model()
        config = self.vllm_config
        runner = self.model_runner
        layers = config.compilation_config.static_forward_context.values()
        backends = Counter(
            layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")
        )
        device = torch.device(self.device)
        return {
            "model_class": type(model).__name__,
            "weight_methods": _weight_methods(model),
            "parameter_dtypes": dict(Counter(_name(parameter.dtype) for parameter in model.parameters())),
            "lm_head_weight_dtype": _lm_head_dtype(model),
            "attention_backends": dict(backends),
            "kv_cache_dtypes": sorted({_name(tensor.dtype) for tensor in _tensors(runner.kv_caches)}),
            "model_runner": "v2" if self.use_v2_model_runner else "v1",
            "model_runner_class": f"{type(runner).__module__}.{type(runner).__name__}",
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "num_threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _tensors(branch)


def _weight_methods(model: torch.nn.Module) -> dict[str, int]:
    """How the layers' weights are held and multiplied, by vLLM's own names: whether quantisation reached them."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import LinearMethodBase

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return dict(
        Counter(
            type(method).__name__ for method in methods if isinstance(method, LinearMethodBase | FusedMoEMethodBase)
        )
    )


def _lm_head_dtype(model: torch.nn.Module) -> str | None:
    """Dtype of the output projection's weight; tied models project with the embedding."""
    for name in ("lm_head", "embed_tokens"):
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if path.rpartition(".")[2] == name and isinstance(weight, torch.Tensor):
                return _name(weight.dtype)
    return None
