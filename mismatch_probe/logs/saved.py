"""Rows of what `torch.save` wrote: refused with the file's name, tensors read as they are asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.pickles import Names
from mismatch_probe.logs.row import Row
from mismatch_probe.logs.torch_files import TENSOR_NAMES, StoredTensor, TorchFile, torch_file
from mismatch_probe.reading import Unreadable


def refusal(path: Path, reason: object) -> UsageError:
    return UsageError(f"the log {path} cannot be read ({reason}); have it written again, or leave it out")


@contextmanager
def saved_file(path: Path, names: Names = TENSOR_NAMES) -> Iterator[TorchFile]:
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
        raise UsageError(f"the log {path} does not exist") from error
    except Unreadable as error:
        raise refusal(path, error) from error


def saved_rows(path: Path, file: TorchFile, samples: Any, columns: Sequence[str]) -> Iterator[Row]:
    """Each of `samples` with those of `columns` that it has.

    Raises:
        UsageError: it is no list of dictionaries.
        Unreadable: a tensor's bytes are not all there.
    """
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise refusal(path, "its samples are no list of dictionaries")
    for number, sample in enumerate(samples):
        there = {name: _read(file, sample[name]) for name in columns if name in sample}
        yield Row(f"sample {number} of {path}", there)


def _read(file: TorchFile, value: Any) -> Any:
    return file.array(value) if isinstance(value, StoredTensor) else value
