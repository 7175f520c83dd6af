# ruff: noqa: N806 - shape suffixes
"""Inside each vLLM worker: what every router chooses, written to files where it hands its choice to the experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file

from mismatch_probe.engines.vllm.hooks import decoder_layers, write_tokens

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


class _Recorder:
    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._folder = folder
        self._step = -1
        self._chosen: dict[str, Tensor] = {}
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]
        self._routers: dict[int, Any] = {}
        for number, layer in enumerate(decoder_layers(model)):
            for module in layer.module.modules():
                router: Any = getattr(module, "router", None)
                if hasattr(router, "select_experts") and id(router) not in self._routers:
                    self._routers[id(router)] = router
                    router.select_experts = self._recording(router.select_experts, number)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for router in self._routers.values():
            del router.select_experts

    def _recording(self, select_experts: Callable[..., tuple[Tensor, Tensor]], layer: int) -> Any:
        def recording(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights_TK, experts_TK = select_experts(*args, **kwargs)
            self._chosen[f"experts.{layer}"] = experts_TK.to("cpu", torch.int32, copy=True).contiguous()
            self._chosen[f"weights.{layer}"] = weights_TK.to("cpu", torch.float32, copy=True).contiguous()
            return weights_TK, experts_TK

        return recording

    @property
    def _step_folder(self) -> Path:
        return self._folder / f"step-{self._step:04d}"

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step += 1
        write_tokens(self._step_folder, kwargs)

    def _end(self, *_: Any) -> None:
        save_file(self._chosen, self._step_folder / CHOICES_FILE)
        self._chosen = {}
