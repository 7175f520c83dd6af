"""The arrays of one pair: the rows of its legs are joined and checked; unusable ones are counted and left out."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.records.sequences import leg_columns
from mismatch_probe.records.summary import Counts
from mismatch_probe.stats.sequences import (
    MOST_ROUNDED_UP,
    Array,
    Ints,
    Mask,
    Reals,
    Sequences,
    TokenPair,
    is_missing,
    is_usable,
    rows_of,
)
from mismatch_probe.stats.zeros import Gaps, LeftOutTotals, zeros_for_missing
from mismatch_probe.verdict.case import IdsCheck

RowArrays = list[npt.NDArray[Any]]


def rows_in(column: pa.ChunkedArray) -> RowArrays:
    """The lists of a column, empty where there is none."""
    return rows_of(np.asarray(pa.compute.list_flatten(column).to_numpy()), offsets_in(column))


def offsets_in(column: pa.ChunkedArray) -> Ints:
    """The start of each list among all values, and the end of the last [N + 1]."""
    lengths = np.asarray(pa.compute.list_value_length(column).fill_null(0).to_numpy(), dtype=np.int64)
    return np.concatenate([[0], np.cumsum(lengths)])


def concatenate_rows(rows: Sequence[Array]) -> Array:
    """The values of all rows, one row after another."""
    return np.concatenate(rows) if len(rows) else np.zeros(0)


def map_rows(rows: RowArrays, change: Callable[[Array], Array]) -> RowArrays:
    """The rows after `change` of all values."""
    return rows_of(change(concatenate_rows(rows)), _row_offsets(rows))


def rows_with(rows: RowArrays, test: Callable[[Array], Mask]) -> Mask:
    """The mask of the rows with a value that passes the test [N]."""
    holds = np.asarray(test(concatenate_rows(rows)), dtype=np.bool_)
    return np.asarray(np.bincount(_row_of_each(rows)[holds], minlength=len(rows)) > 0)


def count_values(rows: RowArrays, test: Callable[[Array], Mask]) -> int:
    """The number of values of all rows that pass the test."""
    return int(test(concatenate_rows(rows)).sum())


def masked_rows(rows: RowArrays, masks: RowArrays | None) -> RowArrays:
    """The values of each row [T] that its mask [T] chooses; without masks, and of a row of another length, all."""
    if masks is None:
        return rows
    complete = [
        mask if row.size == mask.size else np.ones(row.size, dtype=np.bool_)
        for row, mask in zip(rows, masks, strict=True)
    ]
    mask = concatenate_rows(complete).astype(np.bool_)
    lengths = np.bincount(_row_of_each(rows)[mask], minlength=len(rows))
    return rows_of(concatenate_rows(rows)[mask], np.concatenate([[0], np.cumsum(lengths)]))


def _row_offsets(rows: RowArrays) -> Ints:
    return np.concatenate([[0], np.cumsum([row.size for row in rows], dtype=np.int64)])


def _row_of_each(rows: RowArrays) -> Ints:
    return np.repeat(np.arange(len(rows)), [row.size for row in rows])


def without_zeros_for_missing(
    logprobs: Mapping[str, list[Reals]], roles_to_judge: Collection[str]
) -> tuple[dict[str, list[Reals]], int]:
    """The log-probs of each row by role (`mu`, `pi`, `ref`), with NaN for zeros that stand for missing numbers.

    Only the roles in `judged` are changed, and only rows whose roles have one length. The second result is the number
    of tokens with such a zero.
    """
    of_rows = zip(*logprobs.values(), strict=True)
    rows = [row for row, sides in enumerate(of_rows) if sides[0].size and len({side.size for side in sides}) == 1]
    clean_logprobs = {role: list(values) for role, values in logprobs.items()}
    if not rows:
        return clean_logprobs, 0
    offsets = np.cumsum([0, *(logprobs["mu"][row].size for row in rows)])
    has_zero: Mask = np.zeros(offsets[-1], dtype=np.bool_)
    for role in (role for role in roles_to_judge if role in logprobs):
        values, others = (
            np.concatenate([logprobs[name][row] for row in rows]) for name in (role, "pi" if role == "mu" else "mu")
        )
        absent = zeros_for_missing(values, others, offsets)
        has_zero |= absent
        if absent.any():
            parts = rows_of(np.where(absent, np.nan, values), offsets)
            for row, part in zip(rows, parts, strict=True):
                clean_logprobs[role][row] = part
    return clean_logprobs, int(has_zero.sum())


@dataclass(frozen=True)
class PairData:
    """A pair ready for statistics."""

    legs: dict[str, str]
    counts: Counts
    pair: TokenPair | None
    """The usable rows as arrays; None where there are none."""
    rollouts: pa.Table
    rows: npt.NDArray[np.int64]
    """The numbers of the usable rows of `rollouts`."""
    ids: IdsCheck | None = None
    """The finding on the first leg that was scored on other token ids than were sampled."""
    prompt_start: TokenPair | None = None
    """pi against mu's prefill on the first tokens of each prompt."""
    legs_are_identified: bool = False
    """Each leg names the side that computed it, and is this run's; two columns of a log have no such names."""
    key_of: dict[str, int] = field(default_factory=dict)
    """The hash of each usable row's token ids, by its id."""
    usable: list[Mask] | None = None
    """The mask of the tokens of each usable row that were sampled and have every log-prob; None where all do."""
    gaps: Gaps | None = None
    """All sampled tokens, where some are left out."""

    @property
    def cluster_names(self) -> list[str]:
        """The cluster of each usable row: its prompt, or the cluster that an imported run records."""
        return _cluster_names(self.rollouts, self.rows)

    @property
    def row_ids(self) -> list[str]:
        """Id of each usable row."""
        return [str(row_id) for row_id in self.rollouts["id"].take(pa.array(self.rows)).to_pylist()]

    def measured_positions(self, row: int) -> npt.NDArray[np.int64]:
        """The positions in the response of usable row `row` of the tokens that the pair contains.

        The policy sampled them, and they have every log-prob.
        """
        if "sampled" not in self.rollouts.column_names:
            return np.arange(len(self.rollouts["token_ids"][int(self.rows[row])]))
        sampled_places = np.flatnonzero(np.asarray(self.rollouts["sampled"][int(self.rows[row])].as_py(), dtype=bool))
        return sampled_places if self.usable is None else sampled_places[self.usable[row]]

    def is_complete(self, row: int) -> bool:
        """Whether the pair holds all sampled tokens of usable row `row`."""
        return self.usable is None or bool(self.usable[row].all())

    def position_in_response(self, row: int, position: int) -> int:
        """The position in the response of usable row `row` of the `position`-th token that the pair contains."""
        return int(self.measured_positions(row)[position])

    def prompts_of_starts(self, num_tokens: int) -> list[list[int]]:
        """The first ids of the prompt of each sequence of `prompt_start`; none without it."""
        if self.pair is None or self.prompt_start is None:
            return []
        clusters, places = np.unique(self.pair.sequences.clusters, return_index=True)
        rows = self.rows[places[np.isin(clusters, self.prompt_start.sequences.clusters)]]
        return [ids[:num_tokens] for ids in self.rollouts["prompt_token_ids"].take(pa.array(rows)).to_pylist()]

    @property
    def prompt_lengths(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each usable row."""
        return np.diff(offsets_in(self.rollouts["prompt_token_ids"]))[self.rows]


@dataclass(frozen=True)
class LegColumns:
    logprobs: list[Reals]
    by_token: Mapping[str, list[npt.NDArray[Any]] | None]
    """The other columns with a value a token, by name (`leg_columns`); None where the leg lacks one."""
    prompt_starts: list[Reals] | None
    keys: npt.NDArray[np.uint64]
    foreign: npt.NDArray[np.bool_]


def join_legs(
    legs: dict[str, str], tables: dict[str, LegColumns], rollouts: pa.Table, *, in_part: bool, num_zeros: int
) -> PairData:
    """Join the legs of a pair and count what is unusable.

    in_part: a response is used without the tokens that lack a log-prob, which a log may not have recorded; a run that
    computed its legs itself has all log-probs, or is broken. num_zeros: tokens whose zero stands for a missing number.
    """
    mu, pi = tables["mu"], tables["pi"]
    foreign = np.logical_or.reduce([leg.foreign for leg in tables.values()])
    empty = np.asarray([len(logprobs) == 0 for logprobs in mu.logprobs], dtype=bool)
    void = {role: rows_with(leg.logprobs, lambda row: ~_is_log_prob(row)) for role, leg in tables.items()}
    void_checks = np.logical_or.reduce(
        [rows_of_role for role, rows_of_role in void.items() if role not in ("mu", "pi")]
    )
    usable = _usable_tokens(tables, foreign) if in_part else None
    incomplete = np.logical_or.reduce(list(void.values())) if usable is None else ~rows_with(usable, np.asarray)
    rows = np.flatnonzero(~(foreign | empty | incomplete))
    present = mu.logprobs if usable is None else usable
    counts = Counts(
        num_sequences=len(rows),
        num_prompts=len(np.unique(np.asarray(rollouts["prompt_id"].to_pylist())[rows])),
        num_tokens=sum(present[row].size if usable is None else int(np.count_nonzero(present[row])) for row in rows),
        missing_mu=count_values(mu.logprobs, is_missing),
        missing_pi=count_values(pi.logprobs, is_missing),
        nonfinite_mu=count_values(mu.logprobs, np.isinf),
        nonfinite_pi=count_values(pi.logprobs, np.isinf),
        positive_mu=count_values(mu.logprobs, _above_zero),
        positive_pi=count_values(pi.logprobs, _above_zero),
        void_checks=int(void_checks.sum()),
        mismatched_ids=int(foreign.sum()),
        zeros_for_missing=num_zeros,
        truncated_responses=rollouts["finish_reason"].to_pylist().count("length"),
        **({} if usable is None else _left_out_counts(tables, usable, np.flatnonzero(~foreign))),
    )
    if not len(rows):
        return PairData(legs, counts, None, rollouts, rows)
    kept_of_rows = None if usable is None or not counts.left_out_tokens else [usable[row] for row in rows]
    pair = _token_pair(tables, rollouts, rows, kept_of_rows)
    start = _prompt_start(tables, pair, rows)
    gaps = None
    if usable is not None and counts.left_out_tokens:
        gaps = _gaps_of_rows(tables, rollouts, usable, np.flatnonzero(~(foreign | empty)))
    return PairData(legs, counts, pair, rollouts, rows, prompt_start=start, usable=kept_of_rows, gaps=gaps)


def _usable_tokens(tables: dict[str, LegColumns], foreign: Mask) -> list[Mask]:
    """The mask of the tokens of each row that have every log-prob [T]; none in a row with other ids."""
    none = np.zeros(0)
    of_legs = [
        [none if is_foreign else values for is_foreign, values in zip(foreign, leg.logprobs, strict=True)]
        for leg in tables.values()
    ]
    of_all = np.logical_and.reduce([_is_log_prob(concatenate_rows(rows)) for rows in of_legs])
    return rows_of(of_all, np.cumsum([0, *(values.size for values in of_legs[0])]))


def _left_out_counts(tables: dict[str, LegColumns], usable: list[Mask], rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Counts of the tokens that are left out and of incomplete responses, and the share of the surprisal left out.

    The surprisal of a token is that under pi, where pi has a log-prob, else under mu.
    """
    if not len(rows):
        return {}
    pi, mu = (_log_probs_or_nan(tables[role], rows) for role in ("pi", "mu"))
    totals = LeftOutTotals.of(pi, mu, np.concatenate([usable[row] for row in rows]))
    return {
        "left_out_tokens": int(totals.out),
        "partial_responses": sum(0 < np.count_nonzero(usable[row]) < usable[row].size for row in rows),
        "left_out_surprisal": totals.of_surprisal,
    }


def _gaps_of_rows(
    tables: dict[str, LegColumns], rollouts: pa.Table, usable: list[Mask], rows: npt.NDArray[np.int64]
) -> Gaps:
    """All sampled tokens of the rows that have a token."""
    sequences = Sequences.of_lengths([usable[row].size for row in rows])
    return Gaps(
        sequences=replace(sequences, steps=_steps_of_rows(rollouts, rows)),
        log_pi=_log_probs_or_nan(tables["pi"], rows),
        log_mu=_log_probs_or_nan(tables["mu"], rows),
        kept=np.concatenate([usable[row] for row in rows]),
    )


def _log_probs_or_nan(leg: LegColumns, rows: npt.NDArray[np.int64]) -> Reals:
    values = np.concatenate([leg.logprobs[row] for row in rows])
    return np.where(_is_log_prob(values), values, np.nan)


def _token_pair(
    tables: dict[str, LegColumns], rollouts: pa.Table, rows: npt.NDArray[np.int64], usable: list[Mask] | None
) -> TokenPair:
    mu, pi = tables["mu"], tables["pi"]
    clusters = np.unique(_cluster_names(rollouts, rows), return_inverse=True)[1]
    lengths = [mu.logprobs[row].size for row in rows]
    is_usable = np.ones(sum(lengths), dtype=bool) if usable is None else np.concatenate(usable)
    row_sequences = replace(Sequences.of_lengths(lengths, clusters), steps=_steps_of_rows(rollouts, rows))
    sequences = row_sequences.of_usable_tokens(is_usable)
    assert sequences is not None, "every usable row has a token"

    def flat(values: list[npt.NDArray[Any]] | None) -> npt.NDArray[Any] | None:
        return None if values is None else np.concatenate([values[row] for row in rows])[is_usable]

    def log_probs(role: str) -> Reals | None:
        return flat(tables[role].logprobs if role in tables else None)

    def samples_and_turns() -> Iterator[tuple[str, Any]]:
        """The fields of the pair that columns of its legs fill; None where one is absent or lacks a number."""
        in_pair = {column.name for column in fields(TokenPair)}
        for name, column in leg_columns().items():
            for side, leg in (("pi", pi), ("mu", mu)):
                if column.pair and f"{column.pair}_{side}" in in_pair:
                    values = flat(leg.by_token[name])
                    yield f"{column.pair}_{side}", values if values is None or np.isfinite(values).all() else None

    log_mu, log_pi = log_probs("mu"), log_probs("pi")
    assert log_mu is not None
    assert log_pi is not None
    return TokenPair(
        sequences=sequences,
        log_pi=log_pi,
        log_mu=log_mu,
        log_ref=log_probs("ref"),
        log_mu_prefill=log_probs("mu_prefill"),
        log_ref_rounded_pi=log_probs("ref_rounded_pi"),
        log_ref_rounded_mu=log_probs("ref_rounded_mu"),
        log_ref_fp32=log_probs("ref_fp32"),
        log_ref_fp64=log_probs("ref_fp64"),
        **dict(samples_and_turns()),
    )


def _cluster_names(rollouts: pa.Table, rows: npt.NDArray[np.int64]) -> list[str]:
    names = rollouts["cluster" if "cluster" in rollouts.column_names else "prompt_id"]
    return [str(name) for name in names.take(pa.array(rows)).to_pylist()]


def _prompt_start(tables: dict[str, LegColumns], pair: TokenPair, rows: npt.NDArray[np.int64]) -> TokenPair | None:
    """The first tokens of prompts under pi and mu's prefill, from one row a prompt; None where a leg lacks them."""
    if "mu_prefill" not in tables:
        return None
    legs = [leg.prompt_starts for role in ("pi", "mu_prefill", "ref") if (leg := tables.get(role)) is not None]
    clusters, places = np.unique(pair.sequences.clusters, return_index=True)
    if any(leg is None for leg in legs):
        return None
    of_legs = [[leg[row] for row in rows[places]] for leg in legs if leg is not None]
    lengths = np.array([len(values) for values in of_legs[0]])
    if not lengths.any() or not all(_is_log_prob(values).all() for of_leg in of_legs for values in of_leg):
        return None
    log_pi, log_mu, *log_ref = (np.concatenate(of_leg) for of_leg in of_legs)
    sequences = Sequences.of_lengths(lengths[lengths > 0], clusters[lengths > 0])
    return TokenPair(sequences, log_pi, log_mu, log_ref[0] if log_ref else None)


def _steps_of_rows(rollouts: pa.Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """The step of each usable row of an imported run, -1 where the log lacks it; None for a run's own responses."""
    if "step" not in rollouts.column_names:
        return None
    return np.asarray(rollouts["step"].fill_null(-1).to_numpy(), dtype=np.int64)[rows]


def _is_log_prob(values: Reals) -> Mask:
    return np.asarray(is_usable(values) & ~_above_zero(values))


def _above_zero(values: Reals) -> npt.NDArray[np.bool_]:
    return np.asarray((values > MOST_ROUNDED_UP) & np.isfinite(values))
