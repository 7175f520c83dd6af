"""A checkpoint's files by the model: whether weights fit the config, what a cast changes, what each layer holds.

The parts are those of one decoder layer, or all the others, read as transformers reads them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, UsageError, message_of
from mismatch_probe.notation import write_many
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.provenance.stored_tensors import WEIGHTS as ADAPTER
from mismatch_probe.provenance.stored_tensors import stored_quantization
from mismatch_probe.reading import flat
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.loading import is_transformers_own, load_config, maker_of, no_progress_bars

NO_LAYER: Final = -1
"""The number of the part outside the layers: embeddings, the last norm, the head."""

Tensors = dict[str, torch.Tensor]


def make_table_of_renamed_weights() -> None:
    """Have transformers make it, once for all jobs that are forked from this process."""
    get_checkpoint_conversion_mapping("llama")


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers.

    Raises:
        EngineError: the model has no plain list of them.
    """
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList)]
    layers = [children for children in lists if len(children) == number]
    if len(layers) != 1:
        raise EngineError(
            f"{type(model).__name__} cannot be computed layer by layer: its layers stand in no list of their own; "
            "set reference.by_layer = false, or give --reference none"
        )
    return layers[0]


class StoredParts:
    """The tensors of a checkpoint's files by the part that they belong to.

    They are read by transformers' own loading, so that what it renames, stacks (experts) or keeps in FP32 is as in a
    model that is loaded at once.
    """

    def __init__(self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
        """dtype: the format to which parameters are cast as they are read."""
        with torch.device("meta"):
            self._shell: PreTrainedModel = maker_of(config).from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        self._folder = folder
        self._dtype = dtype
        layers = layers_of(self._shell)
        self.num_layers = len(layers)
        self._layers_name = next(f"{name}." for name, module in self._shell.named_modules() if module is layers)
        self._loaded_names: set[str] = set()
        self._where = self._files_of_parts()

    def names_without_file(self) -> set[str]:
        """The model's parameters and stored buffers that no file holds."""
        return self._shell.state_dict().keys() - self._loaded_names

    def stored_bytes(self, part: int) -> int:
        """The size of a part in the files."""
        headers = {path: safetensors_header(path) for path in self._where.get(part, {})}
        return sum(
            end - begin
            for path, names in self._where.get(part, {}).items()
            for begin, end in (headers[path][name]["data_offsets"] for name in names)
        )

    def computed_bytes(self, part: int, dtype: torch.dtype) -> int:
        """The size of a part as parameters of the format of computation."""
        return sum(tensor.numel() for tensor in self._shell_tensors(part).values()) * dtype.itemsize

    def read_part(self, part: int, device: torch.device) -> Tensors:
        """The part's parameters and stored buffers on `device`, by the model's names for them.

        Raises:
            UsageError: a file is broken.
            EngineError: transformers cannot convert a weight.
        """
        mapping: Any = get_model_conversion_mapping(self._shell)
        config = LoadStateDictConfig(
            device_map={"": device},
            dtype=self._dtype,
            dtype_plan=self._shell._get_dtype_plan(self._dtype),
            weight_mapping=mapping,
        )
        try:
            with ExitStack() as files, no_progress_bars():
                slices: dict[str, Any] = {}
                for path, names in self._where.get(part, {}).items():
                    file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
                    slices.update((name, file.get_slice(name)) for name in names)
                report, _ = convert_and_load_state_dict_in_model(self._shell, slices, config)
        except SafetensorError as error:
            raise UsageError(
                f"a weight file of {self._folder} is broken ({message_of(error)}); download or write the checkpoint "
                "again"
            ) from error
        wrong = {**dict.fromkeys(map(str, report.mismatched_keys)), **report.conversion_errors}
        if wrong:
            raise EngineError(f"{next(iter(wrong))} of {self._folder} does not fit its config.json; fix the checkpoint")
        return self._detach(part)

    def _detach(self, part: int) -> Tensors:
        """Take the tensors of a part that was read out of the shell."""
        tensors = {name: tensor.detach() for name, tensor in self._shell_tensors(part).items() if not tensor.is_meta}
        for name, tensor in tensors.items():
            set_tensor(self._shell, name, torch.empty_like(tensor, device="meta"))
        return tensors

    def _shell_tensors(self, part: int) -> Tensors:
        state: Tensors = self._shell.state_dict()
        return {name: tensor for name, tensor in state.items() if self._part_of(name) == part}

    def _files_of_parts(self) -> dict[int, dict[Path, list[str]]]:
        """The files of each part, and the names of its tensors in each."""
        mapping = get_model_conversion_mapping(self._shell)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state, prefix = self._shell.state_dict(), self._shell.base_model_prefix
        places: dict[int, dict[Path, list[str]]] = {}
        for path in weight_files(self._folder):
            for tensor_entry in safetensors_header(path):
                name, _ = rename_source_key(tensor_entry, renamings, converters, prefix, state)
                self._loaded_names.add(name)
                places.setdefault(self._part_of(name), {}).setdefault(path, []).append(tensor_entry)
        return places

    def _part_of(self, name: str) -> int:
        suffix = name.removeprefix(self._layers_name)
        number = suffix.partition(".")[0]
        return int(number) if suffix != name and number.isdigit() else NO_LAYER


def set_tensor(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set the parameter or buffer of that name in the model to the tensor."""
    owner_name, _, own = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if own in owner._parameters:
        owner._parameters[own] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[own] = tensor


def require_no_missing(folder: Path, names: Iterable[str]) -> None:
    """
    Raises:
        UsageError: `names` has weights; no file holds them.
    """
    missing_names = sorted(names)
    if missing_names:
        raise UsageError(
            f"{folder} lacks {write_many(len(missing_names), 'weight')} of its architecture, such as "
            f"{missing_names[0]}, which would be random; give --model a complete causal language model"
        )


Shape = tuple[int, ...]


def require_fit(folder: Path, *, trust_remote_code: bool) -> None:
    """Require every weight of the architecture, in the shape that the config gives it.

    Weights that are stored in another form are not judged: quantised weights, weights that transformers
    rearranges as it loads them, and a checkpoint that brings its own code.

    Raises:
        UsageError: a weight is missing or has another shape, or the config makes no model.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if not is_transformers_own(config) or getattr(config, "quantization_config", None) is not None:
        return
    shapes = _stored_shapes(folder)
    require_sane(folder, config.get_text_config(), len(shapes))
    model = _model_without_memory(folder, config)
    if get_model_conversion_mapping(model, add_legacy=False):
        return
    model_shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    stored_shapes = _under_the_models_names(shapes, model_shapes, model.base_model_prefix)
    others = [name for name in model_shapes if name in stored_shapes and stored_shapes[name] != model_shapes[name]]
    if others:
        name = others[0]
        raise UsageError(
            f"the weights of {folder} do not fit its config.json: {name} has shape "
            f"{_write_shape(stored_shapes[name])}, and the config asks for {_write_shape(model_shapes[name])} "
            f"(so for {len(others)} weights); fix --model"
        )
    missing = [
        name
        for name in model_shapes
        if name not in stored_shapes and not _is_computed_by_model(name, model, stored_shapes)
    ]
    if missing:
        raise UsageError(
            f"{folder} lacks {write_many(len(missing), 'weight')} of its architecture, such as {missing[0]}, which "
            "would be random; give --model a complete causal language model"
        )


def require_layers(folder: Path, config: PreTrainedConfig) -> None:
    """Require that the model can be computed layer by layer."""
    layers_of(_model_without_memory(folder, config))


def require_sane(folder: Path, config: PreTrainedConfig, num_stored: int) -> None:
    """Require a plausible number of layers: each has a weight, and a model of 10^9 layers would never be built."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and not 0 < layers <= num_stored:
        raise UsageError(
            f"the config of {folder} asks for {layers} layers, and its files hold {num_stored} weights; fix it"
        )
    padding, vocabulary = config.pad_token_id, getattr(config, "vocab_size", None)
    if isinstance(padding, int) and isinstance(vocabulary, int) and padding >= vocabulary:
        raise UsageError(
            f"the config of {folder} has a vocabulary of {vocabulary} and pads with token {padding}, which is outside "
            "it; fix config.json"
        )


def _model_without_memory(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = maker_of(config).from_config(config)
    except Exception as error:  # a config that makes no model raises whatever its modules meet
        raise UsageError(
            f"the config of {folder} makes no model ({_error_text(error, config)}); fix config.json"
        ) from error
    return model


def _error_text(error: Exception, config: PreTrainedConfig) -> str:
    """The error's text; a name that transformers does not have is shown with the config's field that holds it."""
    looked_up = error.args[0] if isinstance(error, KeyError) and error.args else None
    fields = [name for name, value in flat(config.to_dict()) if value == looked_up and isinstance(value, str)]
    return f"{fields[0]} = {looked_up!r} is none that transformers knows" if fields else message_of(error)


def _stored_shapes(folder: Path) -> dict[str, Shape]:
    headers = [safetensors_header(path) for path in weight_files(folder)]
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}


def _under_the_models_names(
    stored_shapes: Mapping[str, Shape], model_shapes: Mapping[str, Shape], prefix: str
) -> dict[str, Shape]:
    """The shapes by the model's names: transformers loads checkpoints without a head or with a prefix of all names."""
    forms = (
        dict(stored_shapes),
        {f"{prefix}.{name}": shape for name, shape in stored_shapes.items()},
        {name.removeprefix(f"{prefix}."): shape for name, shape in stored_shapes.items()},
    )
    return max(forms, key=lambda form: len(form.keys() & model_shapes.keys()))


def _is_computed_by_model(name: str, model: PreTrainedModel, stored_shapes: Mapping[str, Shape]) -> bool:
    """Whether transformers makes the weight from another stored one, as a tied head."""
    tied_keys = model.all_tied_weights_keys
    return tied_keys.get(name) in stored_shapes or any(
        target in stored_shapes for target, source in tied_keys.items() if source == name
    )


def _write_shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "()"


@dataclass(frozen=True)
class WeightCast:
    """The effect of a cast of the weights to `dtype`; errors are absolute and exclude overflows.

    `changed_share` of the weights are not exact in it, `num_overflowed` become infinite, `num_flushed` become zero.
    """

    dtype: Dtype
    num_weights: int
    num_changed: int
    num_overflowed: int
    num_flushed: int
    max_abs_error: float

    @property
    def is_exact(self) -> bool:
        return self.num_changed == 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "changed_share": self.num_changed / max(self.num_weights, 1)}


def measure_weight_cast(weights: Iterable[torch.Tensor], dtype: Dtype) -> WeightCast:
    """Compare each floating-point weight with its value after rounding to `dtype`, to nearest even."""
    target = torch_dtype(dtype)
    num_weights = num_changed = num_overflowed = num_flushed = 0
    max_abs_error = 0.0
    for weight in weights:
        if not weight.is_floating_point():
            continue
        num_weights += weight.numel()
        if weight.dtype.itemsize == 1:  # PyTorch promotes no 8-bit format
            weight = weight.float()
        if torch.promote_types(weight.dtype, target) == target:
            continue
        rounded_weight = weight.to(target).to(weight.dtype)
        has_changed = (rounded_weight != weight) & ~weight.isnan()
        if not has_changed.any():
            continue
        old, new = weight[has_changed].double(), rounded_weight[has_changed].double()
        has_overflow = new.isinf() & old.isfinite()
        num_changed += old.numel()
        num_overflowed += int(has_overflow.sum())
        num_flushed += int((new == 0).sum())
        errors = (new - old)[~has_overflow].abs()
        max_abs_error = max(max_abs_error, float(errors.max()) if errors.numel() else 0.0)
    return WeightCast(dtype, num_weights, num_changed, num_overflowed, num_flushed, max_abs_error)


def held_weights(folder: Path, settings: TrainingPathSettings) -> Iterator[torch.Tensor] | None:
    """The tensors that a training path brings to its dtype, or None where no file holds them.

    These are the checkpoint's and an adapter's. No file holds a merged adapter's sums, nor a quantised checkpoint's
    products with their scales.
    """
    if settings.adapter_merged or stored_quantization(folder) is not None:
        return None
    adapter = [] if settings.adapter is None else [Path(settings.adapter) / ADAPTER]
    return stored_tensors([*weight_files(folder), *adapter])


def stored_tensors(files: Iterable[Path]) -> Iterator[torch.Tensor]:
    """Every tensor of some safetensors files, one at a time."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                yield tensors.get_tensor(key)
