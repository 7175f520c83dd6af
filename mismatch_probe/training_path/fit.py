"""Checks of a checkpoint's files before anything runs: whether weights fit the config, what a cast would change."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.config.nested import flat
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.notation import write_many
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.provenance.stored_tensors import WEIGHTS as ADAPTER
from mismatch_probe.provenance.stored_tensors import stored_quantization
from mismatch_probe.training_path.arithmetic import torch_dtype
from mismatch_probe.training_path.by_layer.stored import layers_of
from mismatch_probe.training_path.loading import is_transformers_own, load_config, maker_of

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
