"""From the records to the arrays of one pair: rows joined by id, checked, and what is unusable counted and left out."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.compare import columns
from mismatch_probe.compare.columns import measured_repeats, offsets_in, rows_in, without_zeros_for_missing
from mismatch_probe.config.comparison import PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.digests import seals_prompts
from mismatch_probe.records.legs import Legs, read_prompts, require_own_rollouts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Counts
from mismatch_probe.records.tables import ROLLOUTS, ids_key, in_order, leg_schema, read_rows
from mismatch_probe.stats.sequences import (
    MOST_ROUNDED_UP,
    Mask,
    Reals,
    Sequences,
    TokenPair,
    is_missing,
    is_usable,
    of_sampled_tokens,
    rows_of,
)
from mismatch_probe.stats.zeros import Gaps, LeftOutTotals
from mismatch_probe.verdict.case import IdsFound, examine_ids


@dataclass(frozen=True)
class PairData:
    """A pair ready for statistics: `rows` are the usable rows of `rollouts`; `pair` is None when there is none.

    `ids` says what the first leg with other token ids than were sampled was scored on; `prompt_start` is pi against
    mu's prefill on the first tokens of each prompt. legs_are_identified: each leg says which side computed it, and is
    this run's; two columns of a log do not say so. key_of: the hash of each usable row's token ids, by its id. kept:
    of each usable row the tokens that were sampled and have every log-prob; None: all of them do. gaps: all sampled
    tokens, where some are left out.
    """

    legs: dict[str, str]
    counts: Counts
    pair: TokenPair | None
    rollouts: pa.Table
    rows: npt.NDArray[np.int64]
    ids: IdsFound | None = None
    prompt_start: TokenPair | None = None
    legs_are_identified: bool = False
    key_of: dict[str, int] = field(default_factory=dict)
    usable: list[Mask] | None = None
    gaps: Gaps | None = None

    @property
    def cluster_names(self) -> list[str]:
        """What each usable row is not independent of: its prompt, or what an imported run says."""
        return _cluster_names(self.rollouts, self.rows)

    @property
    def row_ids(self) -> list[str]:
        """Id of each usable row."""
        return [str(row_id) for row_id in self.rollouts["id"].take(pa.array(self.rows)).to_pylist()]

    def measured_positions(self, row: int) -> npt.NDArray[np.int64]:
        """Positions in the response of usable row `row` of the tokens that the pair holds: those that were sampled by
        the policy, and have every log-prob.
        """
        if "sampled" not in self.rollouts.column_names:
            return np.arange(len(self.rollouts["token_ids"][int(self.rows[row])]))
        sampled = np.flatnonzero(np.asarray(self.rollouts["sampled"][int(self.rows[row])].as_py(), dtype=bool))
        return sampled if self.usable is None else sampled[self.usable[row]]

    def is_complete(self, row: int) -> bool:
        """Whether the pair holds all sampled tokens of usable row `row`."""
        return self.usable is None or bool(self.usable[row].all())

    def position_in_response(self, row: int, position: int) -> int:
        """Where in the response of usable row `row` the token lies that is the `position`-th that the pair holds."""
        return int(self.measured_positions(row)[position])

    @property
    def prompt_lengths(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each usable row."""
        return np.diff(offsets_in(self.rollouts["prompt_token_ids"]))[self.rows]


@dataclass(frozen=True)
class _Leg:
    logprobs: list[Reals]
    top1: list[npt.NDArray[Any]] | None
    entropy: list[npt.NDArray[Any]] | None
    prompt_starts: list[Reals] | None
    keys: npt.NDArray[np.uint64]
    foreign: npt.NDArray[np.bool_]


class RunReader:
    """Reads a run's rollouts once and joins legs to them."""

    def __init__(self, run: RunDirectory, manifest: Manifest) -> None:
        self._legs = Legs(run, manifest.run_key)
        self._manifest = manifest
        self._rollouts = read_rows(run.rollouts_path, ROLLOUTS)
        require_own_rollouts(run, manifest.run_key, self._rollouts)
        if seals_prompts(manifest.run_key):
            read_prompts(run, manifest.run_key)

    def pair(self, name: PairName) -> PairData:
        """The pair's responses, sampled by its engine's side.

        Raises:
            BrokenRecord: a leg that the pair needs is missing or lacks rows.
        """
        pi, mu = self._manifest.settings.pi(name[0]), self._manifest.settings.mu(name[1])
        own_rows = pa.array(np.asarray(self._rollouts["sampler"].to_pylist()) == mu.sampler)
        rollouts = self._rollouts.filter(own_rows).combine_chunks()
        legs = self._names(pi, mu)
        prompts, responses = rollouts["prompt_token_ids"].to_pylist(), rollouts["token_ids"].to_pylist()
        keys = [ids_key(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        tables = {role: self._leg(name, rollouts, keys) for role, name in legs.items()}
        if legs["mu"] == mu.leg("decode"):
            decoded = tables["mu"]
            tables["mu"] = replace(decoded, logprobs=columns.each(decoded.logprobs, of_sampled_tokens))
        logged = [role for role, is_logged in (("mu", mu.logged), ("pi", pi.logged)) if is_logged]
        judged = logged if len(logged) < 2 else [*logged, "ref"]
        cleaned, num_zeros = without_zeros_for_missing({role: leg.logprobs for role, leg in tables.items()}, judged)
        tables = {role: replace(leg, logprobs=cleaned[role]) for role, leg in tables.items()}
        foreign = next((role for role, leg in tables.items() if leg.foreign.any()), None)
        data = _join(legs, tables, rollouts, in_part=pi.logged or mu.logged, num_zeros=num_zeros)
        arrays = self._looked_at_closely(pi, mu, data, keys)
        arrays = replace(arrays, legs_are_identified=self._legs.are_identified and not (pi.logged and mu.logged))
        if foreign is None:
            return arrays
        leg = tables[foreign]
        lengths = [len(logprobs) for logprobs in leg.logprobs]
        comparison = examine_ids(legs[foreign], prompts, responses, keys, leg.keys.tolist(), lengths)
        return replace(arrays, ids=comparison)

    def _names(self, pi: Side, mu: Side) -> dict[str, str]:
        """The pair's legs by what they are to it; those that a pair can do without, where they are recorded."""
        sampling = self._manifest.stages.get(mu.stage("sample"))
        is_rescored = sampling is not None and sampling.state == "skipped" and not mu.logged
        legs = {"mu": mu.leg("prefill" if is_rescored else "decode"), "pi": pi.leg()}
        optional = {} if is_rescored else {"mu_prefill": mu.leg("prefill")}
        reference = self._manifest.settings.reference_of(pi)
        if reference is not None:
            legs["ref"] = reference.leg()
            optional["ref_rounded_pi"] = self._rounded(reference, pi, pi)
            if mu.has_weights_of(pi):
                optional["ref_rounded_mu"] = self._rounded(reference, pi, mu)
        return legs | {role: name for role, name in optional.items() if self._legs.path(name).exists()}

    def _looked_at_closely(self, pi: Side, mu: Side, data: PairData, keys: list[int]) -> PairData:
        if data.pair is None:
            return data
        key_of = dict(zip(data.row_ids, (keys[row] for row in data.rows), strict=True))
        repeats = measured_repeats(self._legs, pi, mu, data.pair, key_of)
        return replace(data, pair=replace(data.pair, repeats=repeats), key_of=key_of)

    def _rounded(self, reference: Side, pi: Side, side: Side) -> str:
        """The leg of pi's reference on weights rounded to a side's dtype: its own where that changes none."""
        rounded = self._manifest.settings.reference_of(pi, side.dtype)
        assert rounded is not None
        stage = self._manifest.stages.get(rounded.stage("score"))
        exact = not side.dtype.rounds_coarsely or (stage is not None and stage.state == "skipped")
        return (reference if exact else rounded).leg()

    def _leg(self, name: str, rollouts: pa.Table, keys: list[int]) -> _Leg:
        table = self._legs.read_rows(name, leg_schema(), leg_schema(double=True))
        try:
            table = in_order(table, rollouts["id"].to_pylist())
        except KeyError as error:
            raise BrokenRecord(
                f"leg {name} has no row for response {error}: remove the file and continue with --resume"
            ) from error
        lengths = np.diff(offsets_in(rollouts["token_ids"]))
        ids_keys = np.asarray(table["ids_key"].to_numpy())
        foreign = (ids_keys != np.asarray(keys, dtype=np.uint64)) | (np.diff(offsets_in(table["logprobs"])) != lengths)
        masks = None
        if "sampled" in rollouts.column_names:
            masks = rows_in(rollouts["sampled"])
        return _Leg(
            logprobs=columns.chosen(rows_in(table["logprobs"]), masks),
            top1=_beside_logprobs(name, table, "top1_ids", masks),
            entropy=_beside_logprobs(name, table, "entropy_nats", masks),
            prompt_starts=rows_in(table["start_logprobs"]) if "start_logprobs" in table.column_names else None,
            keys=ids_keys,
            foreign=foreign,
        )


def _join(
    legs: dict[str, str], tables: dict[str, _Leg], rollouts: pa.Table, *, in_part: bool, num_zeros: int
) -> PairData:
    """in_part: a response is used without the tokens that lack a log-prob, which a log may not have recorded; what the
    run computed itself it has for all tokens, or something is broken. num_zeros: tokens whose zero stands for
    none.
    """
    mu, pi = tables["mu"], tables["pi"]
    foreign = np.logical_or.reduce([leg.foreign for leg in tables.values()])
    empty = np.asarray([len(logprobs) == 0 for logprobs in mu.logprobs], dtype=bool)
    void = {role: _void(leg) for role, leg in tables.items()}
    void_checks = np.logical_or.reduce(
        [rows_of_role for role, rows_of_role in void.items() if role not in ("mu", "pi")]
    )
    usable = _usable_tokens(tables, foreign) if in_part else None
    incomplete = np.logical_or.reduce(list(void.values())) if usable is None else ~columns.rows_with(usable, np.asarray)
    rows = np.flatnonzero(~(foreign | empty | incomplete))
    present = mu.logprobs if usable is None else usable
    counts = Counts(
        num_sequences=len(rows),
        num_prompts=len(np.unique(np.asarray(rollouts["prompt_id"].to_pylist())[rows])),
        num_tokens=sum(present[row].size if usable is None else int(np.count_nonzero(present[row])) for row in rows),
        missing_mu=columns.count(mu.logprobs, is_missing),
        missing_pi=columns.count(pi.logprobs, is_missing),
        nonfinite_mu=columns.count(mu.logprobs, np.isinf),
        nonfinite_pi=columns.count(pi.logprobs, np.isinf),
        positive_mu=columns.count(mu.logprobs, _above_zero),
        positive_pi=columns.count(pi.logprobs, _above_zero),
        void_checks=int(void_checks.sum()),
        mismatched_ids=int(foreign.sum()),
        zeros_for_missing=num_zeros,
        truncated_responses=rollouts["finish_reason"].to_pylist().count("length"),
        **({} if usable is None else _left_out_counts(tables, usable, np.flatnonzero(~foreign))),
    )
    if not len(rows):
        return PairData(legs, counts, None, rollouts, rows)
    kept_of_rows = None if usable is None or not counts.left_out_tokens else [usable[row] for row in rows]
    pair = _pair(tables, rollouts, rows, kept_of_rows)
    start = _prompt_start(tables, pair, rows)
    gaps = None
    if usable is not None and counts.left_out_tokens:
        gaps = _gaps(tables, rollouts, usable, np.flatnonzero(~(foreign | empty)))
    return PairData(legs, counts, pair, rollouts, rows, prompt_start=start, usable=kept_of_rows, gaps=gaps)


def _usable_tokens(tables: dict[str, _Leg], foreign: Mask) -> list[Mask]:
    """Of each row the tokens that have every log-prob [T]; none of a row of other ids."""
    none = np.zeros(0)
    of_legs = [
        [none if is_foreign else values for is_foreign, values in zip(foreign, leg.logprobs, strict=True)]
        for leg in tables.values()
    ]
    of_all = np.logical_and.reduce([_is_log_prob(columns.concatenate_rows(rows)) for rows in of_legs])
    return rows_of(of_all, np.cumsum([0, *(values.size for values in of_legs[0])]))


def _left_out_counts(tables: dict[str, _Leg], usable: list[Mask], rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Counts of the tokens that are not kept, of the responses that are there in part, and the share of the surprisal
    that these tokens carry by the side that has a log-prob: by pi where both do not lack one.
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


def _gaps(tables: dict[str, _Leg], rollouts: pa.Table, usable: list[Mask], rows: npt.NDArray[np.int64]) -> Gaps:
    """Of rows that have a token."""
    sequences = Sequences.of_lengths([usable[row].size for row in rows])
    return Gaps(
        sequences=replace(sequences, steps=_steps(rollouts, rows)),
        log_pi=_log_probs_or_nan(tables["pi"], rows),
        log_mu=_log_probs_or_nan(tables["mu"], rows),
        kept=np.concatenate([usable[row] for row in rows]),
    )


def _log_probs_or_nan(leg: _Leg, rows: npt.NDArray[np.int64]) -> Reals:
    values = np.concatenate([leg.logprobs[row] for row in rows])
    return np.where(_is_log_prob(values), values, np.nan)


def _pair(
    tables: dict[str, _Leg], rollouts: pa.Table, rows: npt.NDArray[np.int64], usable: list[Mask] | None
) -> TokenPair:
    mu, pi = tables["mu"], tables["pi"]
    clusters = np.unique(_cluster_names(rollouts, rows), return_inverse=True)[1]
    lengths = [mu.logprobs[row].size for row in rows]
    chosen = np.ones(sum(lengths), dtype=bool) if usable is None else np.concatenate(usable)
    row_sequences = replace(Sequences.of_lengths(lengths, clusters), steps=_steps(rollouts, rows))
    sequences = row_sequences.of_usable_tokens(chosen)
    assert sequences is not None, "every usable row has a token"

    def flat(values: list[npt.NDArray[Any]] | None) -> npt.NDArray[Any] | None:
        return None if values is None else np.concatenate([values[row] for row in rows])[chosen]

    def log_probs(role: str) -> Reals | None:
        return flat(tables[role].logprobs if role in tables else None)

    log_mu, log_pi, entropy = log_probs("mu"), log_probs("pi"), flat(pi.entropy)
    assert log_mu is not None
    assert log_pi is not None
    return TokenPair(
        sequences=sequences,
        log_pi=log_pi,
        log_mu=log_mu,
        log_ref=log_probs("ref"),
        top1_pi=flat(pi.top1),
        top1_mu=flat(mu.top1),
        entropy_pi=entropy if entropy is None or np.isfinite(entropy).all() else None,
        log_mu_prefill=log_probs("mu_prefill"),
        log_ref_rounded_pi=log_probs("ref_rounded_pi"),
        log_ref_rounded_mu=log_probs("ref_rounded_mu"),
    )


def _cluster_names(rollouts: pa.Table, rows: npt.NDArray[np.int64]) -> list[str]:
    names = rollouts["cluster" if "cluster" in rollouts.column_names else "prompt_id"]
    return [str(name) for name in names.take(pa.array(rows)).to_pylist()]


def _prompt_start(tables: dict[str, _Leg], pair: TokenPair, rows: npt.NDArray[np.int64]) -> TokenPair | None:
    """The prompts' first tokens under pi and under mu's prefill, of one row a prompt; None where a leg lacks them."""
    if "mu_prefill" not in tables:
        return None
    legs = [leg.prompt_starts for role in ("pi", "mu_prefill", "ref") if (leg := tables.get(role)) is not None]
    first_of_prompt = rows[np.unique(pair.sequences.clusters, return_index=True)[1]]
    if any(leg is None for leg in legs):
        return None
    of_legs = [[leg[row] for row in first_of_prompt if len(leg[row])] for leg in legs if leg is not None]
    if not of_legs[0] or not all(_are_log_probs(values) for of_leg in of_legs for values in of_leg):
        return None
    log_pi, log_mu, *log_ref = (np.concatenate(of_leg) for of_leg in of_legs)
    lengths = [len(values) for values in of_legs[0]]
    return TokenPair(Sequences.of_lengths(lengths), log_pi, log_mu, log_ref[0] if log_ref else None)


def _steps(rollouts: pa.Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """The step of each usable row of an imported run, -1 where the log does not say; None of a run's own responses."""
    if "step" not in rollouts.column_names:
        return None
    return np.asarray(rollouts["step"].fill_null(-1).to_numpy(), dtype=np.int64)[rows]


def _void(leg: _Leg) -> npt.NDArray[np.bool_]:
    """Rows of the leg with a value that is missing, not finite, or no log-prob."""
    return columns.rows_with(leg.logprobs, lambda values: ~_is_log_prob(values))


def _are_log_probs(values: Reals) -> bool:
    return bool(_is_log_prob(values).all())


def _is_log_prob(values: Reals) -> Mask:
    return np.asarray(is_usable(values) & ~_above_zero(values))


def _above_zero(values: Reals) -> npt.NDArray[np.bool_]:
    return np.asarray((values > MOST_ROUNDED_UP) & np.isfinite(values))


def _beside_logprobs(leg: str, table: pa.Table, name: str, masks: list[Mask] | None) -> list[npt.NDArray[Any]] | None:
    """The lists of a column, of the tokens that were sampled; None where it is absent or has gaps.

    Raises:
        BrokenRecord: it has more or fewer values than there are log-probs.
    """
    if name not in table.column_names or table[name].null_count:
        return None
    if not np.array_equal(offsets_in(table[name]), offsets_in(table["logprobs"])):
        raise BrokenRecord(
            f"leg {leg} has another number of {name} than of logprobs: remove the file and continue with --resume"
        )
    return columns.chosen(rows_in(table[name]), masks)
