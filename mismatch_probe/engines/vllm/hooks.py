"""Forward hooks inside each vLLM worker that record activations and the choice of experts.

vLLM adds the residual stream inside its norms and changes tensors in place later, so everything is copied when seen: a
norm's input is the FP32 sum of what it is given, a layer's output the sum of the two tensors it returns.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.errors import EngineError
from mismatch_probe.records.activations import BLOCK, EMBEDDING, NORM, is_router, key

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


_LAYER: Final = re.compile(r"(.*\.)?layers\.(\d+)")
_UNWATCHED: Final = re.compile(r"rotary|\.experts")
_CORE: Final = ".attn"
TOKENS_FILE: Final = "tokens.safetensors"


class ActivationHooks:
    """Methods vLLM mixes into its worker class through `ProbeWorker`."""

    get_model: Callable[[], Any]

    def probe_layout(self) -> dict[str, Any]:
        """What matches this model with its checkpoint's own names: modules, fused ones, the sizes of their parts."""
        model = self.get_model()
        layers = decoder_layers(model)
        first = layers[0]
        inside = [path for path, _ in first.module.named_modules() if path]
        return {
            "layer_paths": [layer.path for layer in layers],
            "module_paths": inside,
            "fused": dict(getattr(model, "packed_modules_mapping", {})),
            "part_sizes": {
                path: list(module.output_sizes)
                for path, module in first.module.named_modules()
                if hasattr(module, "output_sizes")
            },
        }

    def probe_record(self, folder: str, modules: bool) -> None:
        """Record every forward pass from now on into `folder`, a folder a step; `modules` besides the blocks."""
        self.probe_recorder = _Recorder(self.get_model(), Path(folder), modules=modules)

    def probe_record_stop(self) -> None:
        self.probe_recorder.close()

    @torch.inference_mode()
    def probe_logits(self, source: str, target: str) -> None:
        """Logits of the final hidden states in one file, written to another."""
        model = self.get_model()
        hidden_rows = load_file(source)["hidden"].to(next(model.parameters()).device)
        save_file({"logits": model.compute_logits(hidden_rows).cpu().contiguous()}, target)


class Layer:
    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self.path = path
        self.module = module


def decoder_layers(model: torch.nn.Module) -> list[Layer]:
    """The decoder layers in order: the first list of modules that is called `layers`."""
    layers = [(path, module) for path, module in model.named_modules() if _LAYER.fullmatch(path)]
    if not layers:
        raise EngineError(
            f"vLLM's {type(model).__name__} has no modules called layers.0, layers.1, …, so it cannot be looked into; "
            "use compare, which needs none"
        )
    prefix = layers[0][0].removesuffix("0")
    return [Layer(path, module) for path, module in layers if path.startswith(prefix)]


class StepRecorder(ABC):
    """Hooks on one model that write a folder for each step, with the ids and positions that the step received."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._folder = folder
        self._step = -1
        self._handles = [
            model.register_forward_pre_hook(self._begin_step, with_kwargs=True),
            model.register_forward_hook(lambda *_: self.write(self._step_folder)),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @abstractmethod
    def write(self, folder: Path) -> None:
        """What was seen in a step, at its end."""

    @property
    def _step_folder(self) -> Path:
        return self._folder / f"step-{self._step:04d}"

    def _begin_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step += 1
        self._step_folder.mkdir(parents=True)
        tokens = {name: kwargs[name].long().cpu().contiguous() for name in ("input_ids", "positions")}
        save_file(tokens, self._step_folder / TOKENS_FILE)


class _Recorder(StepRecorder):
    """What a layer gives is written when the layer is done, so memory holds one layer's tensors."""

    def __init__(self, model: torch.nn.Module, folder: Path, *, modules: bool) -> None:
        super().__init__(model, folder)
        self._modules = modules
        self._layer: dict[str, Tensor] = {}
        self._outside: dict[str, Tensor] = {}
        layers = decoder_layers(model)
        base = layers[0].path.removesuffix("layers.0")
        for number, layer in enumerate(layers):
            for path, module in layer.module.named_modules():
                if is_router(path) or (modules and path and not _UNWATCHED.search(path)):
                    self._watch(module, path, self._layer)
            self._watch_layer(layer.module, number)
        around = dict(model.named_modules())
        if base + NORM in around:
            self._watch(around[base + NORM], NORM, self._outside)

    def _watch(self, module: torch.nn.Module, path: str, into: dict[str, Tensor]) -> None:
        def before_call(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = _floating([*args, *kwargs.values()])
            if path.endswith(_CORE):
                for number, tensor in enumerate(inputs[:3]):
                    into[key(path, f"in{number}")] = _copy(tensor)
            elif inputs:
                is_fused_norm = len(inputs) == 2 and inputs[0].shape == inputs[1].shape and "norm" in path
                into[key(path, "in0")] = _copy(inputs[0].float() + inputs[1].float() if is_fused_norm else inputs[0])

        def after_call(_: Any, args: tuple[Any, ...], output: Any) -> None:
            outputs = _floating(output if isinstance(output, (tuple, list)) else [output])
            if outputs:
                into[key(path, "out")] = _copy(outputs[0])

        self._handles += [
            module.register_forward_pre_hook(before_call, with_kwargs=True),
            module.register_forward_hook(after_call),
        ]

    def _watch_layer(self, layer: torch.nn.Module, number: int) -> None:
        def before_call(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0:
                inputs = _copy(_stream(_floating([*args, *kwargs.values()])))
                self._outside[key(BLOCK, "in0")] = inputs
                if self._modules:
                    # Behind the embedding, some models scale outside of it what transformers scales inside.
                    self._outside[key(EMBEDDING, "out")] = inputs.clone()

        def after_call(_: Any, args: tuple[Any, ...], output: Any) -> None:
            outputs = _floating(output if isinstance(output, (tuple, list)) else [output])
            self._layer[key(BLOCK, "out")] = _copy(_stream(outputs))
            save_file(self._layer, self._step_folder / f"layer-{number:03d}.safetensors")
            self._layer.clear()

        self._handles += [
            layer.register_forward_pre_hook(before_call, with_kwargs=True),
            layer.register_forward_hook(after_call),
        ]

    def write(self, folder: Path) -> None:
        save_file(self._outside, folder / "outside.safetensors")
        self._outside.clear()


def _floating(values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _stream(tensors: list[Tensor]) -> Tensor:
    """The residual stream from what a layer is given or returns, in the format it is kept in."""
    if len(tensors) == 1:
        return tensors[0]
    return (tensors[0].float() + tensors[1].float()).to(tensors[0].dtype)


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the host, one row a token."""
    return tensor.detach().flatten(1).to("cpu", copy=True).contiguous()


CHOICES_FILE: Final = "choices.safetensors"


class RoutingHooks:
    """Methods vLLM mixes into its worker class through `ProbeWorker`."""

    get_model: Callable[[], Any]

    def probe_record_routing(self, folder: str) -> None:
        """Write what every router chooses from now on into `folder`, a folder a step."""
        self.probe_routing = _RoutingRecorder(self.get_model(), Path(folder))

    def probe_record_routing_stop(self) -> None:
        self.probe_routing.close()


class _RoutingRecorder(StepRecorder):
    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        super().__init__(model, folder)
        self._choices: dict[str, Tensor] = {}
        self._routers: dict[int, Any] = {}
        for number, layer in enumerate(decoder_layers(model)):
            for module in layer.module.modules():
                router: Any = getattr(module, "router", None)
                if hasattr(router, "select_experts") and id(router) not in self._routers:
                    self._routers[id(router)] = router
                    router.select_experts = self._record_of(router.select_experts, number)

    def close(self) -> None:
        super().close()
        for router in self._routers.values():
            del router.select_experts

    def _record_of(self, select_experts: Callable[..., tuple[Tensor, Tensor]], layer: int) -> Any:
        def recording(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights_TK, experts_TK = select_experts(*args, **kwargs)
            self._choices[f"experts.{layer}"] = experts_TK.to("cpu", torch.int32, copy=True).contiguous()
            self._choices[f"weights.{layer}"] = weights_TK.to("cpu", torch.float32, copy=True).contiguous()
            return weights_TK, experts_TK

        return recording

    def write(self, folder: Path) -> None:
        save_file(self._choices, folder / CHOICES_FILE)
        self._choices = {}
