"""The legs of a pair, read from the records of a run and joined; and a log by its steps, over which the KL may grow."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

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
from mismatch_probe.compare.subsamples import measured_repeats, repeats_in_starts
from mismatch_probe.compare.verdict_input import settings_of_reference
from mismatch_probe.config.comparison import PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import REFERENCE_DTYPES
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.digests import seals_prompts
from mismatch_probe.records.legs import Legs, read_prompts, require_own_rollouts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import leg_columns, weights_order
from mismatch_probe.records.summary import StepSummary
from mismatch_probe.records.tables import ROLLOUTS, ids_key, in_order, leg_schema, read_rows
from mismatch_probe.stats.growth import step_growth
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate, StepGrowth
from mismatch_probe.stats.sequences import Mask, of_sampled_tokens
from mismatch_probe.verdict.case import examine_ids
from mismatch_probe.verdict.preflight.facts import contradiction


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
        settings, sampling = self._manifest.settings, self._manifest.stages.get(mu.stage("sample"))
        is_rescored = sampling is not None and sampling.state == "skipped" and not mu.logged
        legs = {"mu": mu.leg("prefill" if is_rescored else "decode"), "pi": pi.leg()}
        optional = {} if is_rescored else {"mu_prefill": mu.leg("prefill")}
        reference = settings.reference_of(pi)
        if reference is not None and contradiction(settings_of_reference(self._manifest, pi)) is None:
            legs["ref"] = reference.leg()
            optional["ref_rounded_pi"] = self._rounded_reference_leg(reference, pi, pi)
            if mu.has_weights_of(pi):
                optional["ref_rounded_mu"] = self._rounded_reference_leg(reference, pi, mu)
        if any(pi.has_weights_of(settings.pi(name)) for name in self._manifest.rounding_checks):
            optional |= {f"ref_{dtype}": settings.reference_in(dtype, pi).leg() for dtype in REFERENCE_DTYPES}
        return legs | {role: name for role, name in optional.items() if self._legs.path(name).exists()}

    def _with_repeats(self, pi: Side, mu: Side, data: PairData, keys: list[int]) -> PairData:
        if data.pair is None:
            return data
        key_of = dict(zip(data.row_ids, (keys[row] for row in data.rows), strict=True))
        repeats = measured_repeats(self._legs, pi, mu, data, key_of)
        start = data.prompt_start
        if start is not None and self._manifest.images is None:  # other images stand behind equal ids
            start = replace(start, repeats=repeats_in_starts(data))
        return replace(data, pair=replace(data.pair, repeats=repeats), prompt_start=start, key_of=key_of)

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
            by_token={
                column: _token_column(name, table, column, masks)
                for column, kind in leg_columns().items()
                if kind.per_token
            },
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


StepKey = tuple[int | None, str | None]

MOST_ROWS: Final = 500

STEP_METRICS: Final = (
    "abs_logprob_diff",
    "kl_k1",
    "kl_k3",
    "is_ratio_mean_token",
    "outside_band_0.8_1.25",
    "ess_token",
    "ess_seq",
)


def over_steps(data: PairData, level: float) -> list[StepSummary]:
    """The metrics of each step and weight version, in order; none where there is one step, or none is known.

    Where generation runs ahead of training, several weight versions sample the responses of one step: a deviation that
    grows with the number of versions between is staleness, and the deviation of the newest version is not. Of very many
    steps, neighbours are combined.
    """
    keys = step_keys(data)
    order = sorted(set(keys), key=step_order)
    if data.pair is None or len(order) < 2:
        return []
    length = math.ceil(len(order) / MOST_ROWS)
    stretches = [order[start : start + length] for start in range(0, len(order), length)]
    number = {key: place for place, stretch in enumerate(stretches) for key in stretch}
    places = np.asarray([number[key] for key in keys])
    rows = []
    for place, stretch in enumerate(stretches):
        part = data.pair.of_tokens(data.pair.sequences.spread(places == place))
        assert part is not None
        metrics, _ = pair_metrics(part, level, STEP_METRICS)
        rows.append(_stretch_summary(stretch, metrics))
    return rows


def last_step(data: PairData) -> int | None:
    """The last step of a log of several; None where there is one step, or none is known."""
    steps = {step for step, _ in step_keys(data) if step is not None}
    return max(steps) if len(steps) > 1 else None


def _stretch_summary(stretch: Sequence[StepKey], metrics: dict[str, Estimate]) -> StepSummary:
    (first, version), (last, _) = stretch[0], stretch[-1]
    return StepSummary(
        step=first,
        last_step=None if last == first else last,
        weight_version=version if all(other == version for _, other in stretch) else None,
        metrics=metrics,
    )


def growth_over_steps(data: PairData, level: float) -> StepGrowth | None:
    """How the KL grows over the steps, in the newest weights of each, so that staleness moves nothing; None where it
    does not grow, or no steps are known.
    """
    keys = step_keys(data)
    if data.pair is None or not keys:
        return None
    newest = {key[0]: key for key in sorted(set(keys), key=step_order)}
    is_newest = np.asarray([key == newest[key[0]] for key in keys])
    part = data.pair.of_tokens(data.pair.sequences.spread(is_newest))
    return None if part is None else step_growth(part, level)


def step_keys(data: PairData) -> list[StepKey]:
    """Step and weight version of each usable response; none where the responses are of no log."""
    if "step" not in data.rollouts.column_names:
        return []
    steps, versions = (data.rollouts[name].take(data.rows).to_pylist() for name in ("step", "weight_version"))
    return list(zip(steps, versions, strict=True))


def step_order(key: StepKey) -> tuple[int, int, str]:
    """What sorts the keys by step, and within a step from the oldest weights to the newest."""
    step, version = key
    return (-1 if step is None else step, *weights_order(version))
