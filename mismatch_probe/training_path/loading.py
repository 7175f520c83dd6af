"""From a checkpoint's folder to a causal language model, or one sentence why not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mismatch_probe.errors import EngineError, MissingExtra, UsageError
from mismatch_probe.training_path.memory import memory_errors_named


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none.

    Raises:
        UsageError: the name is none, or of a device this machine or PyTorch build lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = "set training.device to auto, cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not a device's name; {ways}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} cannot be used for scoring; {ways}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} is not there: PyTorch sees {torch.cuda.device_count()} GPUs; {ways}")
    return device


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The checkpoint's causal language model in evaluation mode, its parameters cast to `dtype` as they are read.

    Raises:
        UsageError: the folder holds no causal language model, or files that are broken or incomplete.
        MissingExtra: an attention implementation or the device map needs a package that is not installed.
        EngineError: the model does not support what is asked of it.
        OutOfMemory: the weights do not fit.
    """
    config = _load_config(folder, trust_remote_code)
    loader: Any = AutoModelForCausalLM
    advice = "give a training.device_map such as auto, or a smaller model"
    try:
        with memory_errors_named(f"loading {folder}", advice), _no_progress_bars():
            model, report = loader.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                device_map=device_map or ({"": device} if device.type == "cuda" else None),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise UsageError(
            f"a weight file of {folder} is broken ({_first_line(error)}); download or write the checkpoint again"
        ) from error
    except ImportError as error:
        raise MissingExtra(
            f"{folder} cannot be loaded with training.attention = {attention}: {_first_line(error)}; install that "
            "package, or set training.attention to sdpa or eager"
        ) from error
    except OSError as error:
        raise UsageError(
            f"the weights of {folder} cannot be read ({_first_line(error)}); give --model a folder with its "
            "safetensors files complete"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise _refusal(folder, config, attention, error) from error
    _require_complete(folder, report)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _load_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; give --model the folder of a transformers checkpoint")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"the config of {folder} cannot be used ({_first_line(error)}); mend config.json, upgrade transformers, or "
            "set model.trust_remote_code where the checkpoint brings its own code"
        ) from error
    return config


def _refusal(folder: Path, config: PreTrainedConfig, attention: str, error: Exception) -> Exception:
    reason = _first_line(error)
    if "Unrecognized configuration class" in reason:
        return UsageError(
            f"{folder} is a {config.model_type} model, which has no causal language model in transformers; "
            "give --model a causal language model"
        )
    return EngineError(
        f"{folder} cannot be loaded with training.attention = {attention} ({reason}); "
        "set training.attention to another of sdpa, eager and flash_attention_2, or mend the checkpoint"
    )


def _require_complete(folder: Path, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} weights of its architecture, such as {missing[0]}, which would be random; "
            "give --model a complete causal language model"
        )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
