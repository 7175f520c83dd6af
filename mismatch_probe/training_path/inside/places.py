"""Visits to places of a transformers model during its forward pass.

A visit has a place's input and output tensors, and a function that computes the place again on other tensors.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mismatch_probe.records.activations import (
    ACTIVATION,
    ATTENTION,
    BLOCK,
    EMBEDDING,
    NORM,
    ROTARY_KEYS,
    ROTARY_QUERIES,
    is_router,
)
from mismatch_probe.training_path.precision import undivided_modules


@dataclass(frozen=True)
class Visit:
    """A forward pass at one place: tensors [B, S, ...] or [B * S, C]; `recompute` takes tensors shaped like `inputs`.

    `PlaceWatch.erring` can add an error to what it returns where `takes_errors`.
    What rotation and activation are given is not seen: `given` then has its shape and not its values.
    """

    layer: int | None
    place: str
    inputs: list[Tensor]
    output: Tensor
    recompute: Callable[[Sequence[Tensor]], Tensor]
    takes_errors: bool = True


OnVisit = Callable[[Visit], None]


@contextmanager
def watch_places(model: PreTrainedModel, on_visit: OnVisit, *, modules: bool) -> Iterator["PlaceWatch"]:
    """Call `on_visit` after every decoder layer and router and, with `modules`, all modules in and around them.

    Computations of `on_visit` on the model make no visits.
    """
    watch = PlaceWatch(model, on_visit)
    with ExitStack() as stack:
        stack.callback(watch.remove)
        watch.layers(modules=modules)
        if modules:
            stack.enter_context(watch.attention())
        yield watch


class PlaceWatch:
    """Hooks on a model; `router_logits` are those of the last computation, a forward pass's or a `recompute`'s."""

    def __init__(self, model: PreTrainedModel, on_visit: OnVisit) -> None:
        self._model = model
        self._on_visit = on_visit
        self._handles: list[Any] = []
        self._layer: int | None = None
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._tokens: tuple[int, ...] = ()
        self._visiting = False
        self._errors: Mapping[str, Tensor] = {}
        self.router_logits: Tensor | None = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def erring(self, errors: Mapping[str, Tensor]) -> Iterator[None]:
        """While this is open, what a place returns is off by its error, which is shaped like what was visited there."""
        self._errors = errors
        try:
            yield
        finally:
            self._errors = {}

    def layers(self, *, modules: bool) -> None:
        for number, layer in enumerate(undivided_modules(self._model)):
            self._handles.append(layer.register_forward_pre_hook(self._layer_hook(number), with_kwargs=True))
            for path, module in layer.named_modules():
                if is_router(path) or (modules and path and ".experts" not in path and not path.endswith("act_fn")):
                    self._watch_module(module, number, path)
            if modules:
                self._watch_activation(layer, number)
            self._watch_module(layer, number, BLOCK)
        base: Any = self._model.base_model
        if modules:
            self._watch_module(self._model.get_input_embeddings(), None, EMBEDDING)
        if hasattr(base, NORM):
            self._watch_module(base.norm, None, NORM)

    def _layer_hook(self, number: int) -> Callable[..., None]:
        def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._visiting:
                self._layer, self._rotation = number, kwargs.get("position_embeddings")
                self._tokens = tuple(_first_floating(args, kwargs)[1][0].shape[:2])

        return entering

    def _watch_module(self, module: torch.nn.Module, layer: int | None, place: str) -> None:
        def after_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if layer is not None and place in self._errors:
                error = self._errors[place]
                return output + (error.transpose(1, 2) if self._is_heads_first(output) else error)
            where, inputs = _first_floating(args, kwargs)
            output_tensor = first_tensor(output)
            if layer is not None and is_router(place):
                self.router_logits = output_tensor
            if output_tensor is None:
                return None

            def recompute(tensors: Sequence[Tensor]) -> Tensor:
                return _recompute(module, args, kwargs, where, tensors)

            takes_errors = isinstance(output, Tensor) and not is_router(place)
            if self._is_heads_first(output_tensor):
                tokens_first = [tensor.transpose(1, 2) for tensor in inputs]
                swap = output_tensor.transpose(1, 2)
                swapping = partial(_heads_first, recompute)
                self._make_visit(Visit(layer, place, tokens_first, swap, swapping, takes_errors))
            else:
                self._make_visit(Visit(layer, place, inputs, output_tensor, recompute, takes_errors))
            return None

        self._handles.append(module.register_forward_hook(after_call, with_kwargs=True))

    def _is_heads_first(self, output: Tensor) -> bool:
        """Whether it is [B, H, S, D], as norms of queries and keys return it in some architectures."""
        if output.dim() != 4 or tuple(output.shape[:2]) == self._tokens:
            return False
        return (output.shape[0], output.shape[2]) == self._tokens

    def _watch_activation(self, layer: torch.nn.Module, number: int) -> None:
        """Watch gate times up of a feed-forward part, where their product goes into the last projection."""
        mlp: Any = getattr(layer, "mlp", None)
        if not all(hasattr(mlp, name) for name in ("act_fn", "gate_proj", "up_proj", "down_proj")):
            return

        def before_call(_: Any, args: tuple[Tensor, ...]) -> Tensor | None:
            product = args[0]
            if ACTIVATION in self._errors:
                return product + self._errors[ACTIVATION]
            self._make_visit(
                Visit(number, ACTIVATION, [product, product], product, lambda pair: mlp.act_fn(pair[0]) * pair[1])
            )
            return None

        self._handles.append(mlp.down_proj.register_forward_pre_hook(before_call))

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Watch the attention function that the layers call, which is not a module."""
        name = self._model.config.get_text_config()._attn_implementation
        registered_function = ALL_ATTENTION_FUNCTIONS.get(name)

        def watch_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            function = registered_function or sys.modules[type(module).__module__].eager_attention_forward
            if not self._visiting:
                self._visit_rotation(module, *args[:2])
            if self._errors:
                return self._erring_attention(function, module, *args, **kwargs)
            output, weights = function(module, *args, **kwargs)

            def recompute(tensors: Sequence[Tensor]) -> Tensor:
                heads_first = [tensor.transpose(1, 2) for tensor in tensors]
                result: Tensor = function(module, *heads_first, *args[3:], **kwargs)[0]
                return result

            inputs = [tensor.transpose(1, 2) for tensor in args[:3]]
            self._make_visit(Visit(self._layer, ATTENTION, inputs, output, recompute))
            return output, weights

        own = name in ALL_ATTENTION_FUNCTIONS._local_mapping
        ALL_ATTENTION_FUNCTIONS[name] = watch_call
        try:
            yield
        finally:
            if own:
                ALL_ATTENTION_FUNCTIONS[name] = registered_function
            else:
                del ALL_ATTENTION_FUNCTIONS[name]

    def _erring_attention(
        self, function: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        query_BHSD, key_BHSD = (
            tensor_BHSD + self._errors[place].transpose(1, 2) if place in self._errors else tensor_BHSD
            for place, tensor_BHSD in zip((ROTARY_QUERIES, ROTARY_KEYS), args[:2], strict=True)
        )
        output, weights = function(module, query_BHSD, key_BHSD, *args[2:], **kwargs)
        return output + self._errors[ATTENTION] if ATTENTION in self._errors else output, weights

    def _visit_rotation(self, module: torch.nn.Module, query_BHSD: Tensor, key_BHSD: Tensor) -> None:
        rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if rotate is None or self._rotation is None:
            return
        cos, sin = self._rotation
        for place, rotated_BHSD in ((ROTARY_QUERIES, query_BHSD), (ROTARY_KEYS, key_BHSD)):

            def recompute(tensors: Sequence[Tensor]) -> Tensor:
                heads_first = tensors[0].transpose(1, 2)
                result: Tensor = rotate(heads_first, heads_first, cos, sin)[0]
                return result.transpose(1, 2)

            rotation = rotated_BHSD.transpose(1, 2)
            self._make_visit(Visit(self._layer, place, [rotation], rotation, recompute))

    def _make_visit(self, visit: Visit) -> None:
        if self._visiting:
            return
        self._visiting = True
        try:
            self._on_visit(visit)
        finally:
            self._visiting = False


def first_tensor(output: Any) -> Tensor | None:
    """The first floating tensor of a module's output."""
    values = output if isinstance(output, (tuple, list)) else [output]
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def _first_floating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str | None, list[Tensor]]:
    """The place of a module's floating input among its arguments, and the input."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for where, value in arguments:
        if isinstance(value, Tensor) and value.is_floating_point():
            return where, [value]
    return None, []


def _heads_first(recompute: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    return recompute([tensor.transpose(1, 2) for tensor in tensors]).transpose(1, 2)


def _recompute(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: int | str | None,
    tensors: Sequence[Tensor],
) -> Tensor:
    if isinstance(where, int):
        args = (*args[:where], tensors[0], *args[where + 1 :])
    elif isinstance(where, str):
        kwargs = {**kwargs, where: tensors[0]}
    result = first_tensor(module(*args, **kwargs))
    assert result is not None
    return result
