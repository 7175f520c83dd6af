"""Which tensors of two checkpoints hold other numbers, and by how much."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.checkpoint import weight_files
from mismatch_probe.provenance.stored_tensors import StoredTensor, as_numbers, pieces, stored_tensors
from mismatch_probe.reading import Unreadable, opened
from mismatch_probe.records.checkpoint_difference import TensorDifference, WeightsDifference

WHOLE_BYTES: Final = 2 << 30
"""Of a checkpoint; of a larger one a share of each tensor is read."""
_LEAST_BYTES: Final = 1 << 16
_MOST_NAMED: Final = 8
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_SMALLEST_STEP: Final = 2.0**-24
"""FP16's, below which it holds nothing of a number."""


def weights_difference(train: Path, infer: Path, *, whole_bytes: int = WHOLE_BYTES) -> WeightsDifference:
    """The tensors of two checkpoints by name: equal, equal up to the format they are stored in, other, in one alone.

    Raises:
        UsageError: the files of one cannot be read.
    """
    ours, theirs = stored_tensors(train), stored_tensors(infer)
    both = [(name, ours[name], theirs[name]) for name in ours if name in theirs]
    if _are_the_same_files(train, infer):
        return WeightsDifference(num_tensors=len(both))
    is_sampled = max(_num_bytes(ours), _num_bytes(theirs)) > whole_bytes
    most_bytes = max(_LEAST_BYTES, whole_bytes // max(1, len(ours))) if is_sampled else whole_bytes
    with ExitStack() as stack:
        reader = _Reader(stack, most_bytes)
        unequal = [(name, mine, its) for name, mine, its in both if not reader.are_equal(mine, its)]
        gaps = {name: reader.gap(mine, its) for name, mine, its in unequal}
        train_alone, infer_alone = reader.alone(ours, theirs), reader.alone(theirs, ours)
    rounded = [(mine.dtype, its.dtype) for name, mine, its in unequal if gaps[name].is_rounding]
    other = [TensorDifference(name=name, relative=gap.relative) for name, gap in gaps.items() if not gap.is_rounding]
    return WeightsDifference(
        num_tensors=len(both),
        num_other=len(other),
        largest=sorted(other, key=_largest_first)[:_MOST_NAMED],
        num_rounded=len(rounded),
        formats=next(((str(mine), str(its)) for mine, its in rounded), None),
        train_alone=len(train_alone),
        infer_alone=len(infer_alone),
        alone=[*train_alone[:_MOST_NAMED], *infer_alone[:_MOST_NAMED]],
        is_sampled=is_sampled,
    )


@dataclass(frozen=True)
class _Gap:
    """How far two tensors of one name lie apart. is_rounding: no further than the formats that they are stored in."""

    relative: float | None
    is_rounding: bool = False


class _Reader:
    """Reads tensors from files that it opens once; of each at most so many bytes.

    Every method raises UsageError where a file cannot be read.
    """

    def __init__(self, stack: ExitStack, most_bytes: int) -> None:
        self._stack, self._most_bytes = stack, most_bytes
        self._files: dict[Path, IO[bytes]] = {}

    def are_equal(self, ours: StoredTensor, theirs: StoredTensor) -> bool:
        """Whether format, shape and all bytes are."""
        if (ours.format, ours.shape) != (theirs.format, theirs.shape):
            return False
        spans = pieces(ours.num_bytes, self._most_bytes)
        return all(self._read(ours, *span) == self._read(theirs, *span) for span in spans)

    def gap(self, ours: StoredTensor, theirs: StoredTensor) -> _Gap:
        if ours.shape != theirs.shape or ours.dtype is None or theirs.dtype is None:
            return _Gap(None)
        coarser = max(ours.dtype, theirs.dtype, key=lambda dtype: dtype.round_off)
        is_rounding, apart, size = ours.dtype != theirs.dtype, 0.0, 0.0
        for mine, its in self._numbers(ours, ours.dtype, theirs, theirs.dtype):
            distance = np.abs(mine - its)
            allowed = coarser.round_off * np.maximum(np.abs(mine), np.abs(its)) + _SMALLEST_STEP
            is_rounding = is_rounding and bool((distance <= allowed).all())
            apart, size = apart + float(np.square(distance).sum()), size + float(np.square(mine).sum())
        is_known = size > 0 and np.isfinite(apart / size)
        return _Gap(sqrt(apart / size) if is_known else None, is_rounding)

    def alone(self, ours: dict[str, StoredTensor], theirs: dict[str, StoredTensor]) -> list[str]:
        """Names that only `ours` has; a head that is stored beside embeddings that it is equal to is none."""
        embeddings = next((ours[name] for name in ours if name.endswith(_EMBEDDINGS)), None)
        return [
            name
            for name in ours
            if name not in theirs
            and not (name == _HEAD and embeddings is not None and self.are_equal(ours[name], embeddings))
        ]

    def _numbers(
        self, ours: StoredTensor, of_ours: Dtype, theirs: StoredTensor, of_theirs: Dtype
    ) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
        """Both tensors' numbers, piece by piece; the pieces are those of the wider format."""
        wider = max(of_ours, of_theirs, key=lambda dtype: dtype.num_bytes).num_bytes
        most = max(ours.num_bytes, theirs.num_bytes)
        for first, count in pieces(most, self._most_bytes):
            yield (
                as_numbers(
                    self._read(ours, first * of_ours.num_bytes // wider, count * of_ours.num_bytes // wider), of_ours
                ),
                as_numbers(
                    self._read(theirs, first * of_theirs.num_bytes // wider, count * of_theirs.num_bytes // wider),
                    of_theirs,
                ),
            )

    def _read(self, tensor: StoredTensor, first: int, count: int) -> bytes:
        try:
            if tensor.path not in self._files:
                self._files[tensor.path] = self._stack.enter_context(opened(tensor.path))
            file = self._files[tensor.path]
            file.seek(tensor.begin + first)
            return file.read(count)
        except (OSError, Unreadable) as error:
            raise UsageError(f"{tensor.path} cannot be read ({error}): give an intact checkpoint") from error


def _largest_first(tensor: TensorDifference) -> float:
    """Those with no number first."""
    return -np.inf if tensor.relative is None else -tensor.relative


def _num_bytes(tensors: dict[str, StoredTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())


def _are_the_same_files(train: Path, infer: Path) -> bool:
    ours, theirs = ({path.name: path for path in weight_files(folder)} for folder in (train, infer))
    return ours.keys() == theirs.keys() and all(path.samefile(theirs[name]) for name, path in ours.items())
