"""The legs of a pair, read from the records of a run and joined."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.compare.pair_data import (
    LegColumns,
    PairData,
    join_legs,
    map_rows,
    masked_rows,
    offsets_in,
    rows_in,
    without_zeros_for_missing,
)
from mismatch_probe.compare.subsamples import measured_repeats
from mismatch_probe.config.comparison import PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.digests import seals_prompts
from mismatch_probe.records.legs import Legs, read_prompts, require_own_rollouts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import ROLLOUTS, ids_key, in_order, leg_schema, read_rows
from mismatch_probe.stats.sequences import Mask, of_sampled_tokens
from mismatch_probe.verdict.case import examine_ids


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
        """Read the pair's responses, which its engine's side sampled."""
        pi, mu = self._manifest.settings.pi(name[0]), self._manifest.settings.mu(name[1])
        own_rows = pa.array(np.asarray(self._rollouts["sampler"].to_pylist()) == mu.sampler)
        rollouts = self._rollouts.filter(own_rows).combine_chunks()
        legs = self._leg_names(pi, mu)
        prompts, responses = rollouts["prompt_token_ids"].to_pylist(), rollouts["token_ids"].to_pylist()
        keys = [ids_key(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        tables = {role: self._read_leg(name, rollouts, keys) for role, name in legs.items()}
        if legs["mu"] == mu.leg("decode"):
            decode_table = tables["mu"]
            tables["mu"] = replace(decode_table, logprobs=map_rows(decode_table.logprobs, of_sampled_tokens))
        logged_roles = [role for role, is_logged in (("mu", mu.logged), ("pi", pi.logged)) if is_logged]
        roles_to_judge = logged_roles if len(logged_roles) < 2 else [*logged_roles, "ref"]
        clean_logprobs, num_zeros = without_zeros_for_missing(
            {role: leg.logprobs for role, leg in tables.items()}, roles_to_judge
        )
        tables = {role: replace(leg, logprobs=clean_logprobs[role]) for role, leg in tables.items()}
        foreign = next((role for role, leg in tables.items() if leg.foreign.any()), None)
        data = join_legs(legs, tables, rollouts, in_part=pi.logged or mu.logged, num_zeros=num_zeros)
        arrays = self._with_repeats(pi, mu, data, keys)
        arrays = replace(arrays, legs_are_identified=self._legs.are_identified and not (pi.logged and mu.logged))
        if foreign is None:
            return arrays
        leg = tables[foreign]
        lengths = [len(logprobs) for logprobs in leg.logprobs]
        comparison = examine_ids(legs[foreign], prompts, responses, keys, leg.keys.tolist(), lengths)
        return replace(arrays, ids=comparison)

    def _leg_names(self, pi: Side, mu: Side) -> dict[str, str]:
        """The names of the pair's legs by role; optional ones only where they are recorded."""
        sampling = self._manifest.stages.get(mu.stage("sample"))
        is_rescored = sampling is not None and sampling.state == "skipped" and not mu.logged
        legs = {"mu": mu.leg("prefill" if is_rescored else "decode"), "pi": pi.leg()}
        optional = {} if is_rescored else {"mu_prefill": mu.leg("prefill")}
        reference = self._manifest.settings.reference_of(pi)
        if reference is not None:
            legs["ref"] = reference.leg()
            optional["ref_rounded_pi"] = self._rounded_reference_leg(reference, pi, pi)
            if mu.has_weights_of(pi):
                optional["ref_rounded_mu"] = self._rounded_reference_leg(reference, pi, mu)
        return legs | {role: name for role, name in optional.items() if self._legs.path(name).exists()}

    def _with_repeats(self, pi: Side, mu: Side, data: PairData, keys: list[int]) -> PairData:
        if data.pair is None:
            return data
        key_of = dict(zip(data.row_ids, (keys[row] for row in data.rows), strict=True))
        repeats = measured_repeats(self._legs, pi, mu, data, key_of)
        return replace(data, pair=replace(data.pair, repeats=repeats), key_of=key_of)

    def _rounded_reference_leg(self, reference: Side, pi: Side, side: Side) -> str:
        """The leg of pi's reference on weights rounded to a side's dtype; the plain one where rounding is exact."""
        rounded_reference = self._manifest.settings.reference_of(pi, side.dtype)
        assert rounded_reference is not None
        stage = self._manifest.stages.get(rounded_reference.stage("score"))
        exact = not side.dtype.rounds_coarsely or (stage is not None and stage.state == "skipped")
        return (reference if exact else rounded_reference).leg()

    def _read_leg(self, name: str, rollouts: pa.Table, keys: list[int]) -> LegColumns:
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
        return LegColumns(
            logprobs=masked_rows(rows_in(table["logprobs"]), masks),
            top1=_token_column(name, table, "top1_ids", masks),
            entropy=_token_column(name, table, "entropy_nats", masks),
            prompt_starts=rows_in(table["start_logprobs"]) if "start_logprobs" in table.column_names else None,
            keys=ids_keys,
            foreign=foreign,
        )


def _token_column(leg: str, table: pa.Table, name: str, masks: list[Mask] | None) -> list[npt.NDArray[Any]] | None:
    """The lists of a column for the sampled tokens; None where the column is absent or has gaps.

    Raises:
        BrokenRecord: it has more or fewer values than there are log-probs.
    """
    if name not in table.column_names or table[name].null_count:
        return None
    if not np.array_equal(offsets_in(table[name]), offsets_in(table["logprobs"])):
        raise BrokenRecord(
            f"leg {leg} has another number of {name} than of logprobs: remove the file and continue with --resume"
        )
    return masked_rows(rows_in(table[name]), masks)
