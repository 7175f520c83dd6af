"""Two checkpoints are compared: weights, configuration, tokenizer and chat template."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.inert import cut_text, plain
from mismatch_probe.provenance.checkpoint import read_config, read_description, text_config, weight_files
from mismatch_probe.provenance.stored_tensors import StoredTensor, as_numbers, pieces, stored_tensors
from mismatch_probe.reading import Unreadable, differences, open_file, read_text
from mismatch_probe.records.manifest import CheckpointDifference, TensorDifference, WeightsDifference

_TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_OTHER_FILES: Final = ("tokenizer.model", "vocab.json", "merges.txt")
"""Read where there is no tokenizer.json."""

_WITHOUT_EFFECT: Final = ("version", "truncation", "padding")
"""Parts of tokenizer.json that change no id of a prompt that is encoded alone."""

_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_SWITCHES: Final = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "legacy")
"""Compared where both files set them, since programs differ in which defaults they write."""

_QUOTED: Final = 24


def tokenizer_differences(train: Path, infer: Path) -> list[str]:
    """Each in a few words, such as `tokenizer.json: vocabulary (3 tokens)`; none of two that encode alike.

    Raises:
        UsageError: a file holds no JSON object.
    """
    return [*_of_tokenizers(train, infer), *_of_settings(train, infer)]


def template_difference(train: Path, infer: Path) -> str:
    """Where two chat templates begin to differ, in a few words; empty where they are equal.

    Raises:
        UsageError: a file cannot be read.
    """
    ours, theirs = _template(train), _template(infer)
    if ours == theirs:
        return ""
    if not ours or not theirs:
        return "only the training path's has one" if ours else "only the engine's has one"
    place = next(
        (number for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)) if mine != its),
        min(len(ours), len(theirs)),
    )
    return f"from character {place + 1:,} on: {_quote(ours, place)} and {_quote(theirs, place)}"


def _of_tokenizers(train: Path, infer: Path) -> list[str]:
    paths = train / _TOKENIZER, infer / _TOKENIZER
    if not all(path.exists() for path in paths):
        return [name for name in _OTHER_FILES if _bytes(train / name) != _bytes(infer / name)]
    if _bytes(paths[0]) == _bytes(paths[1]):
        return []
    ours, theirs = (read_description(path) or {} for path in paths)
    return [
        f"{_TOKENIZER}: {part.replace('_', ' ')}"
        for part in dict.fromkeys((*ours, *theirs))
        if part not in (*_WITHOUT_EFFECT, "model") and _plain(ours.get(part)) != _plain(theirs.get(part))
    ] + [f"{_TOKENIZER}: {part}" for part in _of_models(ours.get("model"), theirs.get("model"))]


def _of_models(ours: Any, theirs: Any) -> list[str]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return [] if ours == theirs else ["model"]
    differing = []
    for part in dict.fromkeys((*ours, *theirs)):
        mine, its = ours.get(part), theirs.get(part)
        if mine == its or (part == "merges" and _merges(mine) == _merges(its)):
            continue
        if isinstance(mine, Mapping) and isinstance(its, Mapping):
            number = sum(mine.get(token) != its.get(token) for token in {**mine, **its})
            differing.append(f"{part} ({number:,} token{'' if number == 1 else 's'})")
        else:
            differing.append(part.replace("_", " "))
    return differing


def _merges(merges: Any) -> Any:
    """Older files write a merge as one text."""
    return (
        [" ".join(pair) if isinstance(pair, list) else pair for pair in merges] if isinstance(merges, list) else merges
    )


def _of_settings(train: Path, infer: Path) -> list[str]:
    ours, theirs = (read_description(folder / _SETTINGS) or {} for folder in (train, infer))
    both = [name for name in _SWITCHES if None not in (ours.get(name), theirs.get(name))]
    values = [(name, _plain(ours.get(name)), _plain(theirs.get(name))) for name in (*_TOKENS, *both)]
    return [f"{name} is {_write_value(mine)} and {_write_value(its)}" for name, mine, its in values if mine != its]


def _template(folder: Path) -> str:
    """A file of its own stands before the one in the tokenizer's settings; jinja drops one line break at its end."""
    path = folder / _TEMPLATE
    try:
        text: Any = (
            read_text(path) if path.exists() else (read_description(folder / _SETTINGS) or {}).get("chat_template")
        )
    except Unreadable as error:
        raise UsageError(f"{path} cannot be read ({error}): give an intact checkpoint") from error
    return "" if text is None else str(text).removesuffix("\n")


def _plain(value: Any) -> Any:
    """A token by its text, which some programs write next to its properties."""
    return value["content"] if isinstance(value, Mapping) and "content" in value else value


def _write_value(value: Any) -> str:
    return "not set" if value is None else cut_text(plain(str(value)), _QUOTED, keep="start")


def _quote(text: str, place: int) -> str:
    return f"`{plain(cut_text(text[place:], _QUOTED, keep='start'))}`" if place < len(text) else "its end"


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give an intact checkpoint") from error


WHOLE_BYTES: Final = 2 << 30
"""Of a checkpoint; of a larger one a share of each tensor is read."""
_LEAST_BYTES: Final = 1 << 16
_MOST_NAMED: Final = 8
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_SMALLEST_STEP: Final = 2.0**-24
"""FP16's, below which it holds nothing of a number."""


def weights_difference(train: Path, infer: Path, *, whole_bytes: int = WHOLE_BYTES) -> WeightsDifference:
    """The tensors of two checkpoints by name: equal, equal up to the format they are stored in, other, in one alone."""
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
        train_alone, infer_alone = reader.names_alone(ours, theirs), reader.names_alone(theirs, ours)
    rounding_dtypes = [(mine.dtype, its.dtype) for name, mine, its in unequal if gaps[name].is_rounding]
    other = [TensorDifference(name=name, relative=gap.relative) for name, gap in gaps.items() if not gap.is_rounding]
    return WeightsDifference(
        num_tensors=len(both),
        num_other=len(other),
        largest=sorted(other, key=lambda tensor: -np.inf if tensor.relative is None else -tensor.relative)[
            :_MOST_NAMED
        ],
        num_rounded=len(rounding_dtypes),
        formats=next(((str(mine), str(its)) for mine, its in rounding_dtypes), None),
        train_alone=len(train_alone),
        infer_alone=len(infer_alone),
        alone=[*train_alone[:_MOST_NAMED], *infer_alone[:_MOST_NAMED]],
        is_sampled=is_sampled,
    )


@dataclass(frozen=True)
class _Gap:
    """The difference of two tensors of one name."""

    relative: float | None
    is_rounding: bool = False
    """No further than the formats that they are stored in."""


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
        is_rounding, squares, size = ours.dtype != theirs.dtype, 0.0, 0.0
        for mine, its in self._numbers(ours, ours.dtype, theirs, theirs.dtype):
            distance = np.abs(mine - its)
            tolerance = coarser.round_off * np.maximum(np.abs(mine), np.abs(its)) + _SMALLEST_STEP
            is_rounding = is_rounding and bool((distance <= tolerance).all())
            squares, size = squares + float(np.square(distance).sum()), size + float(np.square(mine).sum())
        is_known = size > 0 and np.isfinite(squares / size)
        return _Gap(sqrt(squares / size) if is_known else None, is_rounding)

    def names_alone(self, ours: dict[str, StoredTensor], theirs: dict[str, StoredTensor]) -> list[str]:
        """Names that only `ours` has; a head that is equal to the embeddings stored with it does not count."""
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
                self._files[tensor.path] = self._stack.enter_context(open_file(tensor.path))
            file = self._files[tensor.path]
            file.seek(tensor.begin + first)
            return file.read(count)
        except (OSError, Unreadable) as error:
            raise UsageError(f"{tensor.path} cannot be read ({error}): give an intact checkpoint") from error


def _num_bytes(tensors: dict[str, StoredTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())


def _are_the_same_files(train: Path, infer: Path) -> bool:
    ours, theirs = ({path.name: path for path in weight_files(folder)} for folder in (train, infer))
    return ours.keys() == theirs.keys() and all(path.samefile(theirs[name]) for name, path in ours.items())


def checkpoint_difference(train: tuple[str, Path], infer: tuple[str, Path]) -> CheckpointDifference:
    """Of two checkpoints, each by the name that a side gives it and its folder."""
    ours, theirs = train[1], infer[1]
    generation = (read_description(folder / "generation_config.json") or {} for folder in (ours, theirs))
    return CheckpointDifference(
        train=train[0],
        infer=infer[0],
        weights=weights_difference(ours, theirs),
        config=_differing(*(text_config(read_config(folder)) for folder in (ours, theirs))),
        generation=_differing(*generation),
        tokenizer=tokenizer_differences(ours, theirs),
        chat_template=template_difference(ours, theirs),
    )


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (mine, its) for name, mine, its in differences(ours, theirs)}
