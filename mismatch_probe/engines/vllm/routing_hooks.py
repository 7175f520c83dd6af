# ruff: noqa: N806 - shape suffixes
"""Inside each vLLM worker: what every router chooses, written to files where it hands its choice to the experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file

from mismatch_probe.engines.vllm.hooks import StepRecorder, decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CHOICES_FILE: Final = "choices.safetensors"


class RoutingHooks:
    """Methods vLLM mixes into its worker class through `ProbeWorker`."""

    get_model: Callable[[], Any]

    def probe_record_routing(self, folder: str) -> None:
        """Write what every router chooses from now on into `folder`, a folder a step."""
        self.probe_routing = _Recorder(self.get_model(), Path(folder))

    def probe_record_routing_stop(self) -> None:
        self.probe_routing.close()


class _Recorder(StepRecorder):
    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        super().__init__(model, folder)
        self._chosen: dict[str, Tensor] = {}
        self._routers: dict[int, Any] = {}
        for number, layer in enumerate(decoder_layers(model)):
            for module in layer.module.modules():
                router: Any = getattr(module, "router", None)
                if hasattr(router, "select_experts") and id(router) not in self._routers:
                    self._routers[id(router)] = router
                    router.select_experts = self._recording(router.select_experts, number)

    def close(self) -> None:
        super().close()
        for router in self._routers.values():
            del router.select_experts

    def _recording(self, select_experts: Callable[..., tuple[Tensor, Tensor]], layer: int) -> Any:
        def recording(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights_TK, experts_TK = select_experts(*args, **kwargs)
            self._chosen[f"experts.{layer}"] = experts_TK.to("cpu", torch.int32, copy=True).contiguous()
            self._chosen[f"weights.{layer}"] = weights_TK.to("cpu", torch.float32, copy=True).contiguous()
            return weights_TK, experts_TK

        return recording

    def write(self, folder: Path) -> None:
        save_file(self._chosen, folder / CHOICES_FILE)
        self._chosen = {}
