"""Files of `torch.save`: a zip archive of a pickle and of the tensors' bytes, read without PyTorch.

A tensor's bytes are read when they are asked for.

Rows of what `torch.save` wrote: refused with the file's name, tensors read as they are asked for.
"""

import math
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.pickles import NUMPY_NAMES, NumpyArray, PickleNames, StandIn, load, texts_of
from mismatch_probe.logs.row import Row
from mismatch_probe.reading import Unreadable, open_file

_LARGEST_PICKLE_BYTES: Final = 2**31
_SEARCHED_BYTES: Final = 2**20
_LONGEST_WORD_BYTES: Final = 64
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
_DTYPES: Final = {
    "Double": "<f8",
    "Float": "<f4",
    "Half": "<f2",
    "BFloat16": "<u2",
    "Long": "<i8",
    "Int": "<i4",
    "Short": "<i2",
    "Char": "|i1",
    "Byte": "|u1",
    "Bool": "|b1",
}


class _Storage(NamedTuple):
    """Tuples, unlike dataclasses, cannot be changed by the pickle that they stand in."""

    kind: str
    entry: str
    num_items: int


class PickledTensor(NamedTuple):
    """A tensor whose bytes are still in the file. offset, strides: in items."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> PickledTensor:
    is_shape = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not is_shape or not isinstance(storage, _Storage):
        raise ValueError("no tensor")
    if any(type(number) is not int or number < 0 for number in (offset, *shape, *strides)):
        raise ValueError("no shape")
    return PickledTensor(storage, offset, shape, strides)


TENSOR_NAMES: Final[PickleNames] = {
    "torch._utils._rebuild_tensor_v2": StandIn(_tensor),
    **NUMPY_NAMES,
    "collections.OrderedDict": StandIn(lambda: {}),
    **{f"torch.{name}Storage": name for name in _DTYPES},
}


class TorchFile:
    """An open file of `torch.save`; content is what was saved, with `PickledTensor` for each tensor."""

    def __init__(self, file: IO[bytes], names: PickleNames) -> None:
        self._file = file
        self._entries = _entries(file)
        if self._entry_bytes("byteorder", default=b"little") != b"little":
            raise Unreadable("its numbers are big-endian; save it again on a little-endian machine")
        self.content = load(self._entry_bytes("data.pkl"), names, _storage_of)

    def array(self, tensor: Any) -> npt.NDArray[Any] | None:
        """The numbers of a tensor, BF16 as float32; None for what is no tensor.

        Raises:
            Unreadable: its bytes are not all there.
        """
        if not isinstance(tensor, PickledTensor):
            return None
        kind = np.dtype(_DTYPES[tensor.storage.kind])
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, kind)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        num_items = tensor.storage.num_items
        if tensor.offset + extent > num_items or math.prod(tensor.shape) > num_items:
            raise Unreadable("a tensor in it is larger than what is stored of it")
        data = self._entry_bytes(f"data/{tensor.storage.entry}", tensor.offset * kind.itemsize, extent * kind.itemsize)
        flat = np.frombuffer(data, kind)
        strides = tuple(stride * kind.itemsize for stride in tensor.strides)
        numbers = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False).copy()
        if tensor.storage.kind == "BFloat16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers

    def _entry_bytes(self, name: str, start: int = 0, length: int | None = None, default: bytes | None = None) -> bytes:
        if name not in self._entries and default is not None:
            return default
        return _read_entry_bytes(self._file, self._entries, name, start, length)


@contextmanager
def torch_file(path: Path, names: PickleNames = TENSOR_NAMES) -> Iterator[TorchFile]:
    """The file at `path`, open for as long as its tensors are asked for.

    Raises:
        FileNotFoundError: nothing is there.
        Unreadable: it is no whole file of `torch.save`, or names something else than `names`.
    """
    with open_file(path) as file:
        yield TorchFile(file, names)


def words_in_torch_file(file: IO[bytes], words: Iterable[str]) -> frozenset[str]:
    """Those of `words` that are texts anywhere in what was saved. Nothing of it is loaded. Raises as `torch_file`."""
    entries = _entries(file)
    length = entries["data.pkl"].file_size if "data.pkl" in entries else 0
    absent, tail = {word: texts_of(word) for word in words}, b""
    for start in range(0, max(1, length), _SEARCHED_BYTES):
        tail = tail[-_LONGEST_WORD_BYTES:]
        tail += _read_entry_bytes(file, entries, "data.pkl", start, min(_SEARCHED_BYTES, length - start))
        absent = {word: texts for word, texts in absent.items() if not any(text in tail for text in texts)}
        if not absent:
            break
    return frozenset(words).difference(absent)


def _entries(file: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
    """Each entry by its name without the archive's own, `archive/data.pkl`."""
    try:
        with zipfile.ZipFile(file) as archive:
            return {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise Unreadable("it is no whole file of torch.save") from error


def _read_entry_bytes(
    file: IO[bytes], entries: Mapping[str, zipfile.ZipInfo], name: str, start: int, length: int | None
) -> bytes:
    entry = entries.get(name)
    if entry is None:
        raise Unreadable(f"it is no file of torch.save: {name} is not in it")
    length = entry.file_size - start if length is None else length
    if entry.compress_type != zipfile.ZIP_STORED or start + length > entry.file_size or entry.header_offset < 0:
        raise Unreadable("it is no whole file of torch.save")
    if length > _LARGEST_PICKLE_BYTES and name == "data.pkl":
        raise Unreadable(f"what it holds beside tensors is larger than {_LARGEST_PICKLE_BYTES // 2**30} GiB")
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise Unreadable("it is cut off")
    file.seek(sum(_LOCAL_HEADER.unpack(header)) + start, os.SEEK_CUR)
    data = file.read(length)
    if len(data) < length:
        raise Unreadable("it is cut off")
    return data


def _storage_of(pid: Any) -> _Storage:
    what, kind, entry, _, num_items = pid
    if what != "storage" or kind not in _DTYPES or type(entry) is not str or type(num_items) is not int:
        raise ValueError("no storage")
    return _Storage(kind, entry, num_items)


def refusal(path: Path, reason: object) -> UsageError:
    return UsageError(f"the log {path} cannot be read ({reason}); have it written again, or leave it out")


@contextmanager
def saved_file(path: Path, names: PickleNames = TENSOR_NAMES) -> Iterator[TorchFile]:
    """A file of `torch.save` that holds a dictionary, open for as long as its tensors are asked for.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        with torch_file(path, names) as file:
            if not isinstance(file.content, dict):
                raise Unreadable("it holds no dictionary")
            yield file
    except FileNotFoundError as error:
        raise UsageError(f"there is no log {path}") from error
    except Unreadable as error:
        raise refusal(path, error) from error


def saved_rows(path: Path, file: TorchFile, samples: Any, columns: Sequence[str]) -> Iterator[Row]:
    """Each of `samples` with those of `columns` that it has.

    Raises:
        UsageError: it is no list of dictionaries.
        Unreadable: a tensor's bytes are not all there.
    """
    samples_to_load = samples_of(path, samples)
    for number in range(len(samples_to_load)):
        yield saved_row(path, file, samples_to_load, number, columns)


def saved_row(
    path: Path, file: TorchFile, samples: Sequence[dict[str, Any]], number: int, columns: Sequence[str]
) -> Row:
    """One of `samples`, which `samples_of` checked.

    Raises:
        Unreadable: a tensor's bytes are not all there.
    """
    sample = samples[number]
    return Row(f"sample {number} of {path}", {name: _read(file, sample[name]) for name in columns if name in sample})


def samples_of(path: Path, samples: Any) -> list[dict[str, Any]]:
    """
    Raises:
        UsageError: it is no list of dictionaries.
    """
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise refusal(path, "its samples are no list of dictionaries")
    return samples


def _read(file: TorchFile, value: Any) -> Any:
    if isinstance(value, NumpyArray):
        numbers = value.numbers()
        return value if numbers is None else numbers
    return file.array(value) if isinstance(value, PickledTensor) else value
