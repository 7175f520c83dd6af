"""Loads a causal language model from a checkpoint's folder, or says in one sentence why it cannot.

transformers' `dynamic` rotary frequencies grow with the longest sequence so far and shrink again after one that is
shorter than the trained length: between the two, log-probs would depend on earlier passes. Those of `longrope` depend
on each forward alone. In a padded batch both depend on its longest row.
"""

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from mismatch_probe.config.model import Attention
from mismatch_probe.errors import EngineError, MissingExtra, OutOfMemory, UsageError, message_of
from mismatch_probe.notation import write_many
from mismatch_probe.provenance.checkpoint import read_config
from mismatch_probe.provenance.stored_tensors import stored_quantization
from mismatch_probe.training_path.memory import memory_errors_named

_DYNAMIC: Final = "dynamic"
_LONG: Final = "longrope"


def forget_lengths(model: PreTrainedModel) -> None:
    """Reset the frequencies to the trained ones before every forward, so that no earlier forward matters."""
    for module in model.modules():
        if any(_DYNAMIC in kind for kind, _, _ in _frequency_kinds(module)):
            module.register_forward_pre_hook(_forget_lengths)


def follows_length_beyond(model: PreTrainedModel) -> int | None:
    """The length beyond which the frequencies depend on a forward's longest sequence; None where they never do."""
    limits = []
    for kind, _, parameters in (
        kind_of_module for module in model.modules() for kind_of_module in _frequency_kinds(module)
    ):
        if _DYNAMIC in kind:
            limits.append(int(model.config.get_text_config().max_position_embeddings))
        elif kind == _LONG:
            limits.append(int(parameters["original_max_position_embeddings"]))
    return min(limits, default=None)


def _forget_lengths(module: Any, args: tuple[Any, ...]) -> None:
    """A function and not a method, since a copy of the model would copy a method's owner."""
    for kind, prefix, _ in _frequency_kinds(module):
        if _DYNAMIC in kind:
            frequencies, trained_frequencies = (
                getattr(module, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq")
            )
            module.register_buffer(f"{prefix}inv_freq", trained_frequencies.to(frequencies.device), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _frequency_kinds(module: torch.nn.Module) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The kind of each set of frequencies that a rotary module has, the beginning of its names, and its parameters."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None:
        return
    parameters: Any = getattr(module.config, "rope_parameters", None) or {}
    if isinstance(kinds, str):
        yield kinds, "", parameters
        return
    for layer_type, kind in kinds.items():
        yield kind, f"{layer_type}_", parameters.get(layer_type) or {}


_PACKED_DTYPES: Final = (torch.uint8, torch.int8, torch.int16, torch.int32)
_REPLACING: Final = ("transformers.integrations.", "torch.ao.", "torchao.", "bitsandbytes.", "gptqmodel.", "awq.")
"""Modules of these packages replace those whose weights they hold quantised."""


def ask_for_expansion(config: PreTrainedConfig) -> None:
    """Make transformers multiply the stored weights with their scales at load, where it can for the method.

    On a CPU it does so by itself; on a GPU it would compute in FP8.
    """
    quantization: Any = getattr(config, "quantization_config", None)
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else ""
    config_class = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if config_class is not None and "dequantize" in inspect.signature(config_class).parameters:
        quantization["dequantize"] = True


def require_expanded(folder: Path, model: PreTrainedModel) -> None:
    """
    Raises:
        UsageError: the model holds quantised or packed weights, with which a reference would carry their error.
    """
    if stored_quantization(folder) is None:
        return
    places = [place for name, module in model.named_modules() for place in _quantised_places(name, module)]
    if places:
        raise UsageError(
            f"transformers keeps the weights of {folder} quantised, so that a reference would compute with them as "
            f"they are packed ({len(places)} places, such as {places[0]}); give the training side the checkpoint that "
            "was quantised (--train NAME:checkpoint=...), or --reference none"
        )


def _quantised_places(name: str, module: torch.nn.Module) -> Iterator[str]:
    kind = type(module)
    if kind.__module__.startswith(_REPLACING):
        yield f"{name}, a {kind.__name__}"
    for own, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
            yield f"{name}.{own} in {parameter.dtype}"
    for own, buffer in module.named_buffers(recurse=False):
        if buffer.dtype in _PACKED_DTYPES or (buffer.is_floating_point() and buffer.dtype.itemsize == 1):
            yield f"{name}.{own} in {buffer.dtype}"


SMALLER: Final = "give a training.device_map such as auto, or a smaller model"


def choose_device(name: str) -> torch.device:
    """The device: `cuda` is this process's GPU by torchrun, else the first; `auto` is the CPU where there is no GPU.

    Raises:
        UsageError: there is no such device, or this machine or PyTorch build lacks it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    ways = "set training.device (train: policy.device) to auto, cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not a device's name; {ways}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} cannot be used for scoring; {ways}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} is not there: PyTorch sees {torch.cuda.device_count()} GPUs; {ways}")
    return device


def choose_attention(folder: Path, request: Attention | None, *, trust_remote_code: bool) -> Attention:
    """The attention of the request; without one SDPA, or eager attention where SDPA does not compute the architecture.

    Raises:
        UsageError: the folder holds no causal language model, or one without SDPA attention where that is asked for.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if request == "sdpa" and not has_sdpa(config):
        raise UsageError(
            f"{folder} is a {config.model_type} model, which has no sdpa attention in transformers; leave it "
            "unset, or set training.attention (train: policy.attention) to eager"
        )
    return request or _default_attention(config)


def sdpa_leaves_out(config: PreTrainedConfig) -> str | None:
    """The part of the architecture that transformers' SDPA attention silently drops; None where it drops nothing."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if cap is None else f"the soft cap of attention scores (attn_logit_softcapping = {cap:g})"


def has_sdpa(config: PreTrainedConfig) -> bool:
    """Whether transformers has SDPA attention for the architecture; a checkpoint's own code is not imported."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            model: Any = mapping[type(config)]
            return bool(model._supports_sdpa)
    return True


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention: str | None,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
    is_expanded: bool = False,
    sharding: Mapping[str, Any] | None = None,
    advice: str = SMALLER,
) -> PreTrainedModel:
    """The checkpoint's causal language model in evaluation mode, its parameters cast to `dtype` as they are read.

    Without `attention` it is that of `choose_attention`. expanded: no weight stays quantised, on any device. sharding:
    the arguments by which each rank reads a part (`ranks.sharding.loading_arguments`). advice: for want of memory.

    Raises:
        UsageError: the folder holds no causal language model, or files that are broken or incomplete, or quantised
            weights that transformers does not expand where that is asked for.
        MissingExtra: an attention implementation or the device map needs a package that is not installed.
        EngineError: the model does not support what is asked of it.
        OutOfMemory: the weights do not fit.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    attention = attention or _default_attention(config)
    if is_expanded:
        ask_for_expansion(config)
    loader = maker_of(config)
    try:
        with memory_errors_named(f"loading {folder}", advice), no_progress_bars():
            model, report = loader.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                device_map=device_map or ({"": device} if device.type == "cuda" and not sharding else None),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **(sharding or {}),
            )
    except OutOfMemory:
        raise
    except SafetensorError as error:
        raise UsageError(
            f"a weight file of {folder} is broken ({message_of(error)}); download or write the checkpoint again"
        ) from error
    except ImportError as error:
        raise MissingExtra(
            f"{folder} cannot be loaded with {attention} attention: {message_of(error)}; install that package, or "
            "set training.attention (train: policy.attention) to sdpa or eager"
        ) from error
    except OSError as error:
        raise UsageError(
            f"the weights of {folder} cannot be read ({message_of(error)}); give --model a folder with its "
            "safetensors files complete"
        ) from error
    except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(
            f"{folder} cannot be loaded with {attention} attention ({message_of(error)}); set training.attention "
            "(train: policy.attention) to another of sdpa, eager and flash_attention_2, or fix the checkpoint"
        ) from error
    _require_complete(folder, report)
    if is_expanded:
        require_expanded(folder, model)
    ready_model: PreTrainedModel = model.eval()
    forget_lengths(ready_model)
    return ready_model


def load_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The checkpoint's config without its choice of attention.

    That could name a package that is absent here, or a kernel of the hub, whose code would be fetched and run.

    Raises:
        UsageError: the folder has no usable config, or that of a model that is no causal language model.
    """
    read_config(folder)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # a damaged file raises whatever its reader meets
        raise UsageError(
            f"the config of {folder} cannot be used ({message_of(error)}); fix config.json, upgrade transformers, or "
            "set model.trust_remote_code where the checkpoint brings its own code"
        ) from error
    config._attn_implementation = None
    if not is_transformers_own(config) and not _brings_its_code(config, trust_remote_code):
        raise UsageError(
            f"{folder} is a {config.model_type} model, which has no causal language model in transformers; "
            "give --model a causal language model"
        )
    return config


def is_transformers_own(config: PreTrainedConfig) -> bool:
    """Whether transformers has a class that computes log-probs of text for this config."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or _only_sees_too(config)


def maker_of(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the model.

    For a model that also sees and has no causal class there (Qwen2.5-VL) it is the full model; text reaches its text
    part alone.
    """
    return AutoModelForImageTextToText if _only_sees_too(config) else AutoModelForCausalLM


def require_sight(folder: Path, config: PreTrainedConfig, label: str) -> None:
    """
    Raises:
        UsageError: the model takes text alone, and the prompt that `label` names holds an image.
    """
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or config.get_text_config() is config:
        raise UsageError(
            f"{label} holds an image, and {folder} is a {config.model_type} model, which takes text alone; give "
            "--model a vision-language checkpoint of transformers, or prompts of text"
        )


def _only_sees_too(config: PreTrainedConfig) -> bool:
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder
    return sees and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.get_text_config() is not config


def _brings_its_code(config: PreTrainedConfig, trust_remote_code: bool) -> bool:
    return trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def _default_attention(config: PreTrainedConfig) -> Attention:
    return "sdpa" if has_sdpa(config) and sdpa_leaves_out(config) is None else "eager"


def _require_complete(folder: Path, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"{folder} lacks {write_many(len(missing), 'weight')} of its architecture, such as {missing[0]}, which "
            "would be random; give --model a complete causal language model"
        )
    unexpected_keys = sorted(report["unexpected_keys"]) if stored_quantization(folder) else []
    if unexpected_keys:
        raise UsageError(
            f"transformers reads the quantised weights of {folder} and leaves out "
            f"{write_many(len(unexpected_keys), 'tensor')} of them, such as {unexpected_keys[0]}: without these "
            "they are other weights; give the training side the checkpoint that was "
            "quantised (--train NAME:checkpoint=...)"
        )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
