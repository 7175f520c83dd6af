"""A causal language model whose decoder layers hold their weights only while they compute, and what fits in memory.

The model's own forward runs throughout: rotary positions, masks, windows, soft caps, sinks and experts are the
architecture's code. In a forward of the complete model each layer reads its weights in its turn. For many responses one
layer at a time computes, and the others pass their inputs on.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel

from mismatch_probe.config.model import HIDDEN_SHARE, WEIGHTS_SHARE, ReferenceSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, MismatchProbeError, message_of
from mismatch_probe.host import release_freed_memory
from mismatch_probe.notation import write_size
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.provenance.stored_tensors import stored_quantization
from mismatch_probe.training_path.arithmetic import is_16_bit
from mismatch_probe.training_path.batching import forward_exchanged
from mismatch_probe.training_path.fit import (
    NO_LAYER,
    StoredParts,
    Tensors,
    layers_of,
    require_no_missing,
    set_tensor,
)
from mismatch_probe.training_path.loading import choose_device, forget_lengths, load_config, maker_of
from mismatch_probe.training_path.memory import free_memory, memory_errors_named

_HOST: Final = torch.device("cpu")


def why_by_layer(
    folder: Path, dtype: Dtype, training: TrainingPathSettings, reference: ReferenceSettings
) -> str | None:
    """Why the reference in `dtype` is computed layer by layer; None where it is loaded at once.

    By default that is so where its weights do not fit the free memory. With an adapter, a device map or quantised
    weights it is always loaded at once, and fails where it does not fit.
    """
    if reference.by_layer:
        return "reference.by_layer asks for it"
    if training.adapter is not None or training.device_map is not None or stored_quantization(folder) is not None:
        return None
    device = choose_device(training.device)
    num_bytes, free = weight_bytes(folder, dtype), free_memory(device)
    if not reference.holds_one_layer(num_bytes, free):
        return None
    return f"its weights in {dtype} take {write_size(num_bytes)}, and {write_size(free)} are free ({device})"


def weight_bytes(folder: Path, dtype: Dtype) -> int:
    """The bytes of all stored weights in the format of computation."""
    headers = [safetensors_header(path) for path in weight_files(folder)]
    parameters: int = sum(prod(entry["shape"]) for header in headers for entry in header.values())
    return parameters * dtype.num_bytes


def fits_two_layers(device: torch.device, outside_bytes: int, largest_bytes: int) -> bool:
    """Whether a layer can be read while another computes."""
    return outside_bytes + 2 * largest_bytes <= WEIGHTS_SHARE * free_memory(device)


def fit_in_memory(hidden_bytes: int) -> bool:
    """Whether so many bytes of hidden states fit in the host's memory; else they are kept on disk."""
    return hidden_bytes <= HIDDEN_SHARE * free_memory(_HOST)


Forward = Callable[..., torch.Tensor]


class LayeredModel:
    """A `model` that computes in `dtype` and is complete but for its layers' weights.

    With `reads_ahead` the next layer is read while one computes, which takes the memory of two. A layer's first result
    in a forward of the complete model is compared with that of the layer alone; a difference is refused.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, at_load: torch.dtype, device: torch.device, *, trust_remote_code: bool
    ) -> None:
        config = load_config(folder, trust_remote_code=trust_remote_code)
        self.parts = StoredParts(folder, config, at_load, trust_remote_code=trust_remote_code)
        parts = range(self.parts.num_layers)
        largest = max(self.parts.computed_bytes(number, dtype) for number in parts)
        self.reads_ahead = fits_two_layers(device, self.parts.computed_bytes(NO_LAYER, dtype), largest)
        self._folder, self._dtype, self._device = folder, dtype, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        with init_empty_weights(include_buffers=False):
            model = maker_of(config).from_config(
                config, dtype=at_load, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
        self.model: PreTrainedModel = model.eval()
        layers = layers_of(self.model)
        self._name = next(name for name, module in self.model.named_modules() if module is layers)
        self._parameter_names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self._proven_layers: set[int] = set()
        self._input_ids = torch.empty(0)
        forget_lengths(self.model)
        self._fill_weights(self.parts.read_part(NO_LAYER, device))
        missing = self.parts.names_without_file()
        self.model.tie_weights(missing, recompute_mapping=False)
        ignored_keys = self.model._keys_to_ignore_on_load_missing or ()
        require_no_missing(
            folder, (name for name in missing if not any(re.search(each, name) for each in ignored_keys))
        )
        for name, buffer in self.model.named_buffers():
            set_tensor(self.model, name, buffer.to(device, dtype if is_16_bit(buffer) else None))
        self._note_ids()
        for name, parameter in layers.named_parameters():
            set_tensor(layers, name, torch.empty_like(parameter, dtype=dtype))
        for number, layer in enumerate(layers):
            vars(layer)["forward"] = self._forward_with_read(number, layer)

    @contextmanager
    def fill(self, number: int, tensors: Tensors | None = None) -> Iterator[None]:
        """Fill the layer's weights inside the block, from `tensors` where they were read before."""
        layer = layers_of(self.model)[number]
        self._fill_weights(self.parts.read_part(number, self._device) if tensors is None else tensors)
        parameters = layer.named_parameters(prefix=f"{self._name}.{number}")
        require_no_missing(self._folder, (name for name, parameter in parameters if parameter.is_meta))
        try:
            yield
        finally:
            for name, parameter in list(layer.named_parameters()):
                set_tensor(layer, name, torch.empty_like(parameter, device="meta"))
            release_freed_memory()

    def each_filled(self, first: int) -> Iterator[int]:
        """The layers from `first` on; each is filled during its iteration."""
        with ThreadPoolExecutor(1) as reader:
            next_part: Future[Tensors] | None = None
            for number in range(first, self.parts.num_layers):
                tensors = None if next_part is None else next_part.result()
                with self.fill(number, tensors):
                    del tensors
                    is_last = number + 1 == self.parts.num_layers
                    next_part = None if is_last or not self.reads_ahead else reader.submit(self._read_ahead, number + 1)
                    yield number

    def _read_ahead(self, number: int) -> Tensors:
        """Read a layer while another computes.

        transformers reads in threads, which would copy in the GPU's queue of computation; so it reads into the host's
        memory, and the copies have a queue of their own.
        """
        if self._copies is None:
            return self.parts.read_part(number, self._device)
        tensors = self.parts.read_part(number, torch.device("cpu"))
        with torch.cuda.stream(self._copies):
            copies = {name: tensors.pop(name).to(self._device) for name in list(tensors)}
        self._copies.synchronize()
        return copies

    def _fill_weights(self, tensors: Tensors) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            takes_part = name in self._parameter_names or is_16_bit(tensor)
            set_tensor(self.model, name, tensor.to(self._dtype) if takes_part else tensor)

    def _note_ids(self) -> None:
        """Keep the ids of every forward. The hook is a function: a copy of the model would copy a method's owner."""

        def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

        self.model.base_model.register_forward_pre_hook(note, with_kwargs=True)

    def _forward_with_read(self, number: int, layer: torch.nn.Module) -> Forward:
        own: Forward = type(layer).forward.__get__(layer)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self.fill(number):
                output = own(*args, **kwargs)
                if number not in self._proven_layers:
                    self._require_same_alone(number, args, kwargs, output)
            return output

        return forward

    def _require_same_alone(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> None:
        """
        Raises:
            EngineError: the layer does not follow from its hidden states alone.
        """
        try:
            inputs = args[0] if args else kwargs["hidden_states"]
            advice = "use a device with more memory"
            with memory_errors_named("trying a layer apart", advice), others_handing_on(self.model, number):
                through_one = through_layer(self.model, number, inputs, self._input_ids)
            same = torch.allclose(through_one, output, rtol=0, atol=0, equal_nan=True)
            why = "gives another result apart from the others"
        except MismatchProbeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            same, why = False, f"takes more than hidden states from the layers before it ({message_of(error)})"
        if not same:
            raise EngineError(
                f"{type(self.model).__name__} cannot be computed layer by layer: layer {number} {why}; set "
                "reference.by_layer = false on a machine with more memory, or give --reference none"
            )
        self._proven_layers.add(number)


@contextmanager
def others_handing_on(model: PreTrainedModel, number: int) -> Iterator[list[torch.nn.Module]]:
    """Make every layer but this one pass its hidden states on, inside the block; gives these layers."""

    def handing_on(*args: Any, **kwargs: Any) -> torch.Tensor:
        inputs: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        return inputs

    others = [layer for place, layer in enumerate(layers_of(model)) if place != number]
    with ExitStack() as stack:
        for layer in others:
            stack.enter_context(forward_exchanged(layer, handing_on))
        yield others


def through_layer(
    model: PreTrainedModel, number: int, hidden_BSD: torch.Tensor | None, input_ids_BS: torch.Tensor
) -> torch.Tensor:
    """Hidden states [B, S, D] behind a filled layer from those before it; None before the first layer."""
    outputs: list[torch.Tensor] = []
    layer = layers_of(model)[number]
    own: Forward = type(layer).forward.__get__(layer)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if hidden_BSD is not None and args:
            args = (hidden_BSD, *args[1:])
        elif hidden_BSD is not None:
            kwargs["hidden_states"] = hidden_BSD
        output = own(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a layer gives a {type(output).__name__}")
        outputs.append(output)
        return output

    with forward_exchanged(layer, forward):
        base: Any = model.base_model
        type(base).forward(base, input_ids=input_ids_BS, use_cache=False)
    (output,) = outputs
    return output


@contextmanager
def behind_layers(model: PreTrainedModel, hidden_BSD: torch.Tensor) -> Iterator[None]:
    """Make a forward compute from these states only what follows the last layer, inside the block."""
    last = layers_of(model)[-1]
    with forward_exchanged(last, lambda *_args, **_kwargs: hidden_BSD):
        yield
