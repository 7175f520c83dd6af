"""Tensors as a checkpoint stores them, and from which of them quantised weights were made."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.checkpoint import read_config, safetensors_header, text_config, weight_files

_AT_A_TIME: Final = 1 << 23
_WORD: Final = 8
_PIECES: Final = 16
_DTYPES: Final = {"F64": Dtype.FP64, "F32": Dtype.FP32, "F16": Dtype.FP16, "BF16": Dtype.BF16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; `format` is the one of its file, BF16 for instance."""

    path: Path
    begin: int
    num_bytes: int
    format: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Dtype | None:
        """The format of its numbers; None where they are of one that nothing computes in alone."""
        return _DTYPES.get(self.format)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by name.

    Raises:
        UsageError: its files cannot be read.
    """
    tensors = {}
    for path in weight_files(folder):
        header = safetensors_header(path)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        data = path.stat().st_size - max(ends, default=0)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = StoredTensor(path, data + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
    return tensors


def pieces(num_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Where to read a tensor, as first byte and number of bytes: all of it, or `most` in evenly spaced pieces."""
    if num_bytes <= most:
        for first in range(0, num_bytes, _AT_A_TIME):
            yield first, min(_AT_A_TIME, num_bytes - first)
        return
    size = most // _PIECES // _WORD * _WORD
    for number in range(_PIECES):
        yield (num_bytes - size) * number // (_PIECES - 1) // _WORD * _WORD, size


def as_numbers(piece: bytes, dtype: Dtype) -> npt.NDArray[np.float64]:
    """The bytes of a piece as numbers."""
    if dtype is Dtype.BF16:
        return (np.frombuffer(piece, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(piece, np.dtype(dtype.torch_name)).astype(np.float64)


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
