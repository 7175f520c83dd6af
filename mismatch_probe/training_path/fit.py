"""Do a checkpoint's weights fit its config? Told from file headers and a model without memory, before anything runs."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from mismatch_probe.config.nested import flat
from mismatch_probe.errors import UsageError, said
from mismatch_probe.notation import write_many
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.training_path.by_layer.stored import layers_of
from mismatch_probe.training_path.loading import is_transformers_own, load_config, maker_of

Shape = tuple[int, ...]


def require_fit(folder: Path, *, trust_remote_code: bool) -> None:
    """Every weight that the architecture has is there, in the shape that the config gives it.

    What is stored otherwise than the model holds it is not judged: quantised weights, weights that transformers
    rearranges as it loads them, and a checkpoint that brings its own code.

    Raises:
        UsageError: a weight is missing or has another shape, or the config makes no model.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if not is_transformers_own(config) or getattr(config, "quantization_config", None) is not None:
        return
    shapes = _stored_shapes(folder)
    _require_sane(folder, config.get_text_config(), len(shapes))
    model = _model_without_memory(folder, config)
    if get_model_conversion_mapping(model, add_legacy=False):
        return
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    stored = _under_the_models_names(shapes, wanted, model.base_model_prefix)
    others = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    if others:
        name = others[0]
        raise UsageError(
            f"the weights of {folder} do not fit its config.json: {name} has shape {_written(stored[name])}, and the "
            f"config asks for {_written(wanted[name])} (so for {len(others)} weights); mend --model"
        )
    missing = [name for name in wanted if name not in stored and not _is_made(name, model, stored)]
    if missing:
        raise UsageError(
            f"{folder} lacks {write_many(len(missing), 'weight')} of its architecture, such as {missing[0]}, which "
            "would be random; give --model a complete causal language model"
        )


def require_layers(folder: Path, config: PreTrainedConfig) -> None:
    """The model can be computed layer by layer.

    Raises:
        UsageError: the config makes no model.
        EngineError: its layers stand in no plain list, as beside those of images.
    """
    layers_of(_model_without_memory(folder, config))


def _require_sane(folder: Path, config: PreTrainedConfig, num_stored: int) -> None:
    """No layer is without a weight, and a thousand million of them would take for ever to lay out."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and not 0 < layers <= num_stored:
        raise UsageError(
            f"the config of {folder} asks for {layers} layers, and its files hold {num_stored} weights; mend it"
        )
    padding, vocabulary = config.pad_token_id, getattr(config, "vocab_size", None)
    if isinstance(padding, int) and isinstance(vocabulary, int) and padding >= vocabulary:
        raise UsageError(
            f"the config of {folder} has a vocabulary of {vocabulary} and pads with token {padding}, which is outside "
            "it; mend config.json"
        )


def _model_without_memory(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = maker_of(config).from_config(config)
    except Exception as error:  # a config that makes no model raises whatever its modules meet
        raise UsageError(f"the config of {folder} makes no model ({_why(error, config)}); mend config.json") from error
    return model


def _why(error: Exception, config: PreTrainedConfig) -> str:
    """A name that transformers looks up and does not have is shown with the field it is the value of."""
    looked_up = error.args[0] if isinstance(error, KeyError) and error.args else None
    fields = [name for name, value in flat(config.to_dict()) if value == looked_up and isinstance(value, str)]
    return f"{fields[0]} = {looked_up!r} is none that transformers knows" if fields else said(error)


def _stored_shapes(folder: Path) -> dict[str, Shape]:
    headers = [safetensors_header(path) for path in weight_files(folder)]
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}


def _under_the_models_names(stored: Mapping[str, Shape], wanted: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """transformers takes a checkpoint of the model without its head, and one whose names all begin with a prefix."""
    forms = (
        dict(stored),
        {f"{prefix}.{name}": shape for name, shape in stored.items()},
        {name.removeprefix(f"{prefix}."): shape for name, shape in stored.items()},
    )
    return max(forms, key=lambda form: len(form.keys() & wanted.keys()))


def _is_made(name: str, model: PreTrainedModel, stored: Mapping[str, Shape]) -> bool:
    """Whether transformers makes the weight from another one that is stored, as it does with a tied head."""
    tied = model.all_tied_weights_keys
    return tied.get(name) in stored or any(target in stored for target, source in tied.items() if source == name)


def _written(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "()"
