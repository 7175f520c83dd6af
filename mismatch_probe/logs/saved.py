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
    checked = samples_of(path, samples)
    for number in range(len(checked)):
        yield saved_row(path, file, checked, number, columns)


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
    return file.array(value) if isinstance(value, StoredTensor) else value
