# ruff: noqa: N806 - shape suffixes
"""The experts that a running vLLM chooses for given tokens, read where its router hands them to the experts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.engines.vllm.hooks import TOKENS_FILE, decoder_layers, write_tokens
from mismatch_probe.engines.vllm.recorded import rows_of_steps
from mismatch_probe.errors import EngineError
from mismatch_probe.records.activations import ActivationBatch
from mismatch_probe.records.routing import SequenceRouting, by_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mismatch_probe.engines.vllm.engine import VllmEngine
    from mismatch_probe.records.sequences import TokenSequence

_CHOICES_FILE: Final = "choices.safetensors"


def record_routing(engine: VllmEngine, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
    """Replay the sequences and keep what every router chose, for each of them in order.

    Raises:
        EngineError: the engine is compiled, has several workers, or no router that could be read.
    """
    settings = engine.effective_settings()
    if settings["num_workers"] != 1 or not settings["enforce_eager"]:
        raise EngineError(
            "experts are read inside one vLLM worker that runs eagerly; give --vllm.enforce_eager true, and leave "
            "--vllm.tensor_parallel_size and its like at 1"
        )
    batch = ActivationBatch(0, 0, list(sequences), [])
    with tempfile.TemporaryDirectory(prefix="mismatch-probe-routing-") as folder:
        engine.llm.collective_rpc("probe_record_routing", args=(folder,))
        try:
            engine.replay(sequences)
        finally:
            engine.llm.collective_rpc("probe_record_routing_stop")
        layers, experts_LTK, weights_LTK = _gathered(Path(folder), batch)
    return by_sequence(sequences, layers, experts_LTK.numpy(), weights_LTK.numpy())


def _gathered(folder: Path, batch: ActivationBatch) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The layers that have experts, and every step's choices in the order of the tokens asked for."""
    steps = sorted(folder.iterdir())
    tokens = [load_file(step / TOKENS_FILE) for step in steps]
    targets = rows_of_steps([(one["input_ids"], one["positions"]) for one in tokens], batch)
    chosen = [load_file(step / _CHOICES_FILE) for step in steps]
    layers = tuple(sorted(int(name.removeprefix("experts.")) for name in chosen[0] if name.startswith("experts.")))
    if not layers:
        raise EngineError(
            "no router of this engine hands its choice to the experts, as in a dense model or where one kernel does "
            "both, so what it chooses cannot be read"
        )
    num_tokens, num_chosen = sum(batch.rows_per_sequence), chosen[0][f"experts.{layers[0]}"].shape[1]
    experts_LTK = torch.full((len(layers), num_tokens, num_chosen), -1, dtype=torch.int32)
    weights_LTK = torch.zeros(len(layers), num_tokens, num_chosen)
    for step, target_T in zip(chosen, targets, strict=True):
        kept_T = target_T >= 0
        for index, layer in enumerate(layers):
            experts_LTK[index, target_T[kept_T]] = step[f"experts.{layer}"][: len(kept_T)][kept_T]
            weights_LTK[index, target_T[kept_T]] = step[f"weights.{layer}"][: len(kept_T)][kept_T]
    return layers, experts_LTK, weights_LTK


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
        save_file(self._chosen, self._step_folder / _CHOICES_FILE)
        self._chosen = {}
