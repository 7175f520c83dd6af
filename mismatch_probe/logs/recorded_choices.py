"""What an engine chose besides tokens, as logs hold it: the experts of each token, and the ids it could have drawn."""

from base64 import b64decode
from binascii import Error as BadBase64
from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.logs.pickles import Unread
from mismatch_probe.logs.row import Row
from mismatch_probe.logs.tables import LONGEST_LIST
from mismatch_probe.records.sequences import IntArray, KeptSets

ABSENT: Final = -1
"""Stands for an expert that was not recorded, and for no id in a padded set."""
_LARGEST_ID: Final = 2**31 - 1
_MOST_NUMBERS: Final = 2**26


def routed_experts(row: Row, column: str) -> IntArray | None:
    """Ids of experts [S, L, K] of S tokens from the first on, in L layers; None where the row has none.

    Lists of lists, an array, the base64 text of an `.npy` file, as vLLM answers, or NeMo-RL's `nrlre1:int16:SxLxK:` and
    the base64 text of the numbers. A token that is null has none.

    Raises:
        UsageError: it is something else.
    """
    value = row.columns.get(column)
    if value is None or isinstance(value, Unread):
        return None
    if isinstance(value, str):
        is_envelope = value.startswith(_ENVELOPE)
        value = _enveloped_array(row, column, value) if is_envelope else _npy_array(row, column, value)
    if isinstance(value, list):
        value = _without_nulls(value)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise row.refusal(f"{column} holds lists of several lengths, or numbers too large") from error
    if array.size == 0:
        return None
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise row.refusal(f"{column} is no list of tokens, of their layers, of ids of experts")
    return np.clip(array, ABSENT, _LARGEST_ID).astype(np.int32)


_ENVELOPE: Final = "nrlre1:"
_ENVELOPED: Final = ("int8", "int16", "int32", "uint8", "uint16")


def _enveloped_array(row: Row, column: str, text: str) -> npt.NDArray[Any]:
    try:
        _, dtype, sizes, data = text.split(":", 3)
        shape = [int(size) for size in sizes.split("x")]
        if dtype not in _ENVELOPED or len(shape) != 3 or min(shape) < 0:
            raise ValueError("no ids")
        array = np.frombuffer(b64decode(data, validate=True), np.dtype(dtype).newbyteorder("<")).reshape(shape)
    except (BadBase64, ValueError) as error:
        raise row.refusal(f"{column} is no array as NeMo-RL packs it (nrlre1:DTYPE:SxLxK:BASE64)") from error
    return array


_LEAST_TOKENS: Final = 64
"""With fewer, groups of twice the size can hold no expert twice by chance."""


def flat_experts(row: Row, column: str, num_tokens: int, sizes: dict[int, int]) -> IntArray | None:
    """Ids of experts [S, L, K] of all tokens but the last, from SGLang's base64 text of int32, which has no shape.

    A router takes no expert twice, so K is the largest number of ids a layer with which none comes twice. sizes: K by
    the ids of a token, as an earlier row of the file showed it; a short row without one is not read (None).

    Raises:
        UsageError: it is no such text.
    """
    text = row.columns.get(column)
    if not isinstance(text, str):
        return routed_experts(row, column)
    try:
        flat = np.frombuffer(b64decode(text, validate=True), "<i4")
    except (BadBase64, ValueError) as error:
        raise row.refusal(f"{column} is no base64 text of int32") from error
    if num_tokens < 2 or not flat.size or flat.size % (num_tokens - 1):
        return None
    of_tokens = flat.reshape(num_tokens - 1, -1)
    num_ids = of_tokens.shape[1]
    if num_ids not in sizes and num_tokens > _LEAST_TOKENS:
        sizes[num_ids] = next(
            size for size in range(num_ids, 0, -1) if num_ids % size == 0 and _are_sets(of_tokens, size)
        )
    if num_ids not in sizes:
        return None
    experts = of_tokens.reshape(num_tokens - 1, -1, sizes[num_ids])
    return routed_experts(Row(row.where, {column: experts}), column)


def _are_sets(of_tokens: IntArray, size: int) -> bool:
    """Whether no group of `size` ids holds one twice; an id that is below 0 was not recorded."""
    groups = np.sort(of_tokens.reshape(-1, size), axis=1)
    return not ((np.diff(groups, axis=1) == 0) & (groups[:, 1:] >= 0)).any()


def _without_nulls(tokens: list[Any]) -> list[Any]:
    example = next((token for token in tokens if token is not None), None)
    if example is None:
        return []
    if all(token is not None for token in tokens):
        return tokens
    return [np.full_like(np.asarray(example), ABSENT) if token is None else token for token in tokens]


def _npy_array(row: Row, column: str, text: str) -> npt.NDArray[Any]:
    """The array of an `.npy` file, whose header is read before any memory is taken."""
    try:
        file = BytesIO(b64decode(text, validate=True))
        npy: Any = np.lib.format
        is_first_version = npy.read_magic(file) == (1, 0)
        shape, _, dtype = (npy.read_array_header_1_0 if is_first_version else npy.read_array_header_2_0)(file)
        if dtype.kind not in "iu" or prod(shape) > _MOST_NUMBERS:
            raise ValueError("no ids")
        if file.getbuffer().nbytes - file.tell() != prod(shape) * dtype.itemsize:
            raise ValueError("cut off")
        file.seek(0)
        array: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    except (BadBase64, ValueError, EOFError) as error:
        raise row.refusal(f"{column} is no array in the base64 text of an .npy file") from error
    return array


def kept_sets(row: Row, column: str) -> KeptSets | None:
    """The sets of a column: a list of ids a token, empty or null where nothing was cut; or an array [T, N] padded with
    -1. None where the row has none.

    Raises:
        UsageError: it is something else.
    """
    value = row.columns.get(column)
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "iu":
        is_id = value != ABSENT
        return KeptSets(_ids(row, column, value[is_id]), is_id.sum(axis=1).cumsum())
    if not isinstance(value, list) or not all(
        each is None or isinstance(each, Sequence | np.ndarray) for each in value
    ):
        raise row.refusal(f"{column} is no list of sets of token ids")
    sets = [() if each is None else each for each in value]
    ids = list(chain.from_iterable(sets))
    return KeptSets(_ids(row, column, ids), np.cumsum([len(each) for each in sets], dtype=np.int64))


def ragged_sets(row: Row, ids_column: str, offsets_column: str, logprobs_column: str) -> KeptSets | None:
    """Sets one behind another, with the offsets [T + 1] where each begins, as slime has them; their log-probs too where
    they are there. Raises as `kept_sets`.
    """
    values = [row.columns.get(column) for column in (ids_column, offsets_column)]
    if any(value is None or isinstance(value, Unread) for value in values):
        return None
    ids, offsets = _ids(row, ids_column, values[0]), np.asarray(values[1])
    is_offsets = offsets.ndim == 1 and offsets.size > 0 and offsets.dtype.kind in "iu"
    if not is_offsets or offsets[0] != 0 or offsets[-1] != ids.size or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise row.refusal(f"{offsets_column} does not say where the sets of {ids_column} begin")
    logprobs = row.optional_numbers(logprobs_column, ids.size)
    return KeptSets(ids, offsets[1:].astype(np.int64), logprobs)


def _ids(row: Row, column: str, values: Any) -> IntArray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise row.refusal(f"{column} holds lists of several lengths, or numbers too large") from error
    if not array.size:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.size > LONGEST_LIST * 8:
        raise row.refusal(f"{column} is no list of sets of token ids")
    if int(array.min()) < 0 or int(array.max()) > _LARGEST_ID:
        raise row.refusal(f"{column} holds a number that is no token id")
    return array.astype(np.int32)
