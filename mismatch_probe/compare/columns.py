"""A run's records read back: columns that hold a list a row, and what was measured more closely on few responses."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.compare.stages import DECODED_ALONE
from mismatch_probe.config.sides import Side
from mismatch_probe.records.legs import Legs
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.results import Estimate, FullVocabularyCheck
from mismatch_probe.stats.sequences import Array, Ints, Mask, Reals, Repeat, Sequences, TokenPair, is_usable, rows_of
from mismatch_probe.stats.subsamples import full_vocabulary_check
from mismatch_probe.stats.zeros import zeros_for_missing

Rows = list[npt.NDArray[Any]]


def rows_in(column: pa.ChunkedArray) -> Rows:
    """The lists of a column, empty where there is none."""
    return rows_of(np.asarray(pa.compute.list_flatten(column).to_numpy()), offsets_in(column))


def offsets_in(column: pa.ChunkedArray) -> Ints:
    """Where each list begins among the values of all, and where the last ends [N + 1]."""
    lengths = np.asarray(pa.compute.list_value_length(column).fill_null(0).to_numpy(), dtype=np.int64)
    return np.concatenate([[0], np.cumsum(lengths)])


def concatenate_rows(rows: Sequence[Array]) -> Array:
    """The values of all rows, one row after another."""
    return np.concatenate(rows) if len(rows) else np.zeros(0)


def each(rows: Rows, change: Callable[[Array], Array]) -> Rows:
    """Every row, changed value by value."""
    return rows_of(change(concatenate_rows(rows)), _offsets(rows))


def rows_with(rows: Rows, test: Callable[[Array], Mask]) -> Mask:
    """Rows with a value that the test holds of [N]."""
    holds = np.asarray(test(concatenate_rows(rows)), dtype=np.bool_)
    return np.asarray(np.bincount(_row_of_each(rows)[holds], minlength=len(rows)) > 0)


def count(rows: Rows, test: Callable[[Array], Mask]) -> int:
    """Values of all rows that the test holds of."""
    return int(test(concatenate_rows(rows)).sum())


def chosen(rows: Rows, masks: Rows | None) -> Rows:
    """Of each row [T] the values that its mask [T] chooses, all without masks; a row of another length stays whole."""
    if masks is None:
        return rows
    complete = [
        mask if row.size == mask.size else np.ones(row.size, dtype=np.bool_)
        for row, mask in zip(rows, masks, strict=True)
    ]
    mask = concatenate_rows(complete).astype(np.bool_)
    lengths = np.bincount(_row_of_each(rows)[mask], minlength=len(rows))
    return rows_of(concatenate_rows(rows)[mask], np.concatenate([[0], np.cumsum(lengths)]))


def _offsets(rows: Rows) -> Ints:
    return np.concatenate([[0], np.cumsum([row.size for row in rows], dtype=np.int64)])


def _row_of_each(rows: Rows) -> Ints:
    return np.repeat(np.arange(len(rows)), [row.size for row in rows])


def without_zeros_for_missing(
    logprobs: Mapping[str, list[Reals]], judged: Collection[str]
) -> tuple[dict[str, list[Reals]], int]:
    """The log-probs of each row, by their role in a pair (`mu`, `pi`, `ref`), with NaN for such zeros of the roles to
    be judged; and how many tokens have one. A row whose roles are not of one length stays as it is.
    """
    of_rows = zip(*logprobs.values(), strict=True)
    rows = [row for row, sides in enumerate(of_rows) if sides[0].size and len({side.size for side in sides}) == 1]
    cleaned = {role: list(values) for role, values in logprobs.items()}
    if not rows:
        return cleaned, 0
    offsets = np.cumsum([0, *(logprobs["mu"][row].size for row in rows)])
    has_zero: Mask = np.zeros(offsets[-1], dtype=np.bool_)
    for role in (role for role in judged if role in logprobs):
        values, others = (
            np.concatenate([logprobs[name][row] for row in rows]) for name in (role, "pi" if role == "mu" else "mu")
        )
        absent = zeros_for_missing(values, others, offsets)
        has_zero |= absent
        if absent.any():
            parts = rows_of(np.where(absent, np.nan, values), offsets)
            for row, part in zip(rows, parts, strict=True):
                cleaned[role][row] = part
    return cleaned, int(has_zero.sum())


def measured_repeats(legs: Legs, pi: Side, mu: Side, pair: TokenPair, key_of: Mapping[str, int]) -> dict[str, Repeat]:
    """What a side computed twice of a few of the pair's responses, whose keys are given by their ids, in its order.

    `pi_other_batch`, `mu_other_batch`: each alone against its batch, by prefill. `pi_again`: each alone twice.
    `pi_other_attention`: each alone, with the two implementations of attention. `mu_cached`: each alone, without and
    behind the prefix cache. `mu_decoded_alone`: the first tokens decoded among many and alone, as far as the same come
    out. What is not recorded, not finite, of other token ids, or of a response that lacks tokens is left out.
    """
    ids = list(key_of)
    offsets = pair.sequences.offsets
    in_batch = dict(zip(ids, rows_of(pair.log_pi, offsets), strict=True))
    prefilled = pair.log_mu_prefill
    decoded = dict(zip(ids, rows_of(pair.log_mu, offsets), strict=True))
    decoded_alone = {row_id: alone for row_id, alone in _decoded_alone(legs, mu, key_of).items() if alone.size}
    replayed = {} if prefilled is None else dict(zip(ids, rows_of(prefilled, offsets), strict=True))
    mu_alone, mu_cached = (_leg(legs, mu.leg(change), key_of) for change in ("alone", "cached"))
    alone, again, other = (_leg(legs, pi.leg(change), key_of) for change in ("alone", "again", "other-attention"))
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    twice = {
        "pi_again": (alone, again),
        "pi_other_batch": (in_batch, alone),
        "pi_other_attention": (alone, other),
        "mu_other_batch": (replayed, mu_alone),
        "mu_cached": (mu_alone, mu_cached),
        "mu_decoded_alone": (
            {row_id: decoded[row_id][: alone.size] for row_id, alone in decoded_alone.items()},
            decoded_alone,
        ),
    }
    repeats = {name: _repeat(*legs, cluster_of) for name, legs in twice.items()}
    return {name: repeat for name, repeat in repeats.items() if repeat is not None}


def _leg(legs: Legs, name: str, key_of: Mapping[str, int]) -> dict[str, Reals]:
    """Usable log-probs by id, empty where the leg was not recorded."""
    return {row_id: values for row_id, values in _rows(legs, name, key_of).items() if is_usable(values).all()}


def _rows(legs: Legs, name: str, key_of: Mapping[str, int]) -> dict[str, Reals]:
    if not legs.path(name).exists():
        return {}
    table = legs.read(name, columns=["id", "ids_key", "logprobs"])
    rows = zip(table["id"].to_pylist(), table["ids_key"].to_pylist(), table["logprobs"].to_pylist(), strict=True)
    return {row_id: np.asarray(logprobs) for row_id, key, logprobs in rows if key_of.get(row_id) == key}


def _decoded_alone(legs: Legs, mu: Side, key_of: Mapping[str, int]) -> dict[str, Reals]:
    """Log-probs of the first tokens as far as they come out the same alone, by id; maybe none."""
    rows = _rows(legs, mu.leg("decoded-alone"), key_of)
    lengths = {row_id: np.append(is_usable(values), False).argmin() for row_id, values in rows.items()}
    return {row_id: values[: lengths[row_id]] for row_id, values in rows.items()}


def share_decoded_alike(
    legs: Legs, mu: Side, pair: TokenPair, key_of: Mapping[str, int], level: float
) -> Estimate | None:
    """Share of responses whose first tokens come out the same alone; None where none was decoded again."""
    alone = _decoded_alone(legs, mu, key_of)
    rows = [row for row, row_id in enumerate(key_of) if row_id in alone]
    if not rows:
        return None
    sequences = Sequences.of_lengths(pair.sequences.lengths[rows], pair.sequences.clusters[rows])
    decoded = np.asarray([alone[row_id].size for row_id in key_of if row_id in alone])
    return Estimator(sequences, level).share(decoded >= np.minimum(sequences.lengths, DECODED_ALONE), "sequence")


def _repeat(first: dict[str, Reals], second: dict[str, Reals], cluster_of: dict[str, int]) -> Repeat | None:
    common_ids = [row_id for row_id in first if row_id in second and first[row_id].size == second[row_id].size]
    if not common_ids:
        return None
    sequences = Sequences.of_lengths(
        [first[row_id].size for row_id in common_ids], [cluster_of[row_id] for row_id in common_ids]
    )
    return Repeat(sequences, *(np.concatenate([leg[row_id] for row_id in common_ids]) for leg in (first, second)))


def full_vocabulary_of(
    legs: Legs, pi: Side, mu: Side, pair: TokenPair, ids: Sequence[str], level: float
) -> FullVocabularyCheck | str:
    """The full-vocabulary check on the pair's responses, whose ids are given in its order, or why there is none."""
    name = pi.full_vocabulary_leg(mu)
    if not legs.path(name).exists():
        return "no whole distributions were recorded"
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    rows = [row for row in legs.read(name).to_pylist() if row["id"] in cluster_of]
    if not rows:
        return "no usable response has whole distributions"
    kl, tv, diff = (np.concatenate([np.asarray(row[name]) for row in rows]) for name in ("full_kl", "full_tv", "diff"))
    broken = ~np.isfinite([kl, tv, diff]).all(axis=0)
    if broken.any():
        return f"the whole distributions are not finite at {broken.sum()} of {broken.size} positions"
    sequences = Sequences.of_lengths([len(row["diff"]) for row in rows], [cluster_of[row["id"]] for row in rows])
    return full_vocabulary_check(sequences, diff, kl, tv, level)
