"""Tensors of a checkpoint as they lie in its safetensors files, read in pieces and without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files

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
