"""From which weights a side has its quantised ones: those that the checkpoint stores, or others that it rounds."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.checkpoint import read_config, safetensors_header, text_config, weight_files

_NAMES: Final = ("quantization_config", "compression_config")
CHECKPOINT: Final = "checkpoint"
AT_LOAD: Final = "at load"


def stored_quantization(folder: Path) -> str | None:
    """How the checkpoint's own weights are quantised, by the name its config gives; None where they are not."""
    config = read_config(folder)
    for part in (config, text_config(config)):
        for name in _NAMES:
            said = part.get(name)
            if said:
                return str(said.get("quant_method", name)) if isinstance(said, dict) else name
    return None


def quantized_facts(folder: Path, method: str | None, dtype: Dtype, *, expanded: bool = False) -> dict[str, Any] | None:
    """What a side that runs in `dtype` holds quantised by `method`, as plain JSON values; None where nothing is.

    source: `checkpoint` where that stores the quantised weights, else `at load`: the side rounds what it has read into
    `dtype`. stored: weights of the checkpoint by the format of its files. expanded: the quantised weights are brought
    to `dtype` again before anything is computed.

    Raises:
        UsageError: the checkpoint cannot be read.
    """
    own = stored_quantization(folder)
    if method is None and own is None:
        return None
    return {
        "method": method or own,
        "source": AT_LOAD if own is None else CHECKPOINT,
        "read_as": None if own else str(dtype),
        "stored": stored_formats(folder),
        "expanded": expanded,
    }


def stored_formats(folder: Path) -> dict[str, int]:
    """Weights of a checkpoint by the format of its files: `{"bf16": 1000, "f8_e4m3": 9000}`.

    Raises:
        UsageError: its files cannot be read.
    """
    formats: Counter[str] = Counter()
    for path in weight_files(folder):
        for entry in safetensors_header(path).values():
            name = str(entry["dtype"]).lower()
            formats[{"f32": "fp32", "f16": "fp16", "f64": "fp64"}.get(name, name)] += prod(entry["shape"])
    return dict(formats)
