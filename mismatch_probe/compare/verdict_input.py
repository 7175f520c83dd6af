"""The input of the verdict: a run's data, the effective settings, and the counterpart that differs in one setting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.provenance.stored_tensors import adapter_key
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import PairSummary, SettingsContrast
from mismatch_probe.stats.estimator import contrast, paired_contrast
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import Estimate, RoutingCheck
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair, rows_of
from mismatch_probe.verdict.case import doubled_first_token, share_without
from mismatch_probe.verdict.departures import exact_pair_agrees, rounding_floor
from mismatch_probe.verdict.preflight.facts import Sides, has_experts
from mismatch_probe.verdict.signatures.profile import Disagreement, root_mean_square
from mismatch_probe.verdict.signatures.weights import floor_with_noise


def sides_of(manifest: Manifest, name: PairName, data: PairData) -> Sides:
    """The effective settings of both sides of a pair, and the first tokens of its prompts."""
    pi, mu = manifest.settings.pi(name[0]), manifest.settings.mu(name[1])
    prompts, start = data.rollouts["prompt_token_ids"].to_pylist(), manifest.model.start_token
    return Sides(
        train_dtype=pi.dtype,
        infer_dtype=mu.dtype,
        train=_recorded_settings(manifest, pi.stage("score")),
        infer=_recorded_settings(manifest, mu.stage("sample")),
        checkpoints=(manifest.identity_of(pi), manifest.identity_of(mu)),
        difference=manifest.difference_of(pi, mu),
        doubled_first_token=doubled_first_token(prompts),
        lacking_start=None if start is None else (start[1], *share_without(start[0], prompts)),
    )


def _recorded_settings(manifest: Manifest, stage: str) -> dict[str, Any]:
    """
    Raises:
        BrokenRecord: the manifest has no such stage, or not the adapter that the stage names.
    """
    if stage not in manifest.stages:
        raise BrokenRecord(f"the manifest says nothing of the stage {stage}, so it is damaged: compare again")
    settings = manifest.stages[stage].effective_settings
    adapter = settings.get("adapter")
    if isinstance(adapter, str):  # a server's side records the folder that it was said to serve
        if adapter_key(adapter) not in manifest.content_keys:
            raise BrokenRecord(f"the manifest says nothing of the adapter {adapter}, so it is damaged: compare again")
        return {**settings, "adapter": {"folder": adapter, "fingerprint": manifest.content_keys[adapter_key(adapter)]}}
    return settings


def disagreements(
    manifest: Manifest, data: Mapping[PairName, PairData], routings: Mapping[PairName, RoutingCheck | str | None]
) -> dict[PairName, Disagreement]:
    """The deviations of every usable pair, each with the result of FP32 against FP32.

    routings: the comparison of both sides' experts, or why there is none.
    """
    deviations = {}
    for name, pair_data in data.items():
        if pair_data.pair is not None:
            check = routings.get(name)
            disagreement = _deviation_of_pair(manifest, name, pair_data)
            deviations[name] = replace(disagreement, routing=check if isinstance(check, RoutingCheck) else None)
    return {
        name: _settled_deviation(disagreement, exact_of(manifest, name, deviations))
        for name, disagreement in deviations.items()
    }


def exact_of(manifest: Manifest, name: PairName, deviations: Mapping[PairName, Disagreement]) -> Disagreement | None:
    """The pair that decides between bug and precision for another pair; None where it was not run or is not usable."""
    exact = manifest.settings.exact_counterpart(name)
    return None if exact is None else deviations.get(exact)


def _settled_deviation(deviation: Disagreement, exact: Disagreement | None) -> Disagreement:
    if exact is None:
        return deviation
    agrees = exact_pair_agrees(exact)
    return replace(deviation, is_settled=not agrees, formats_alone=agrees)


def _deviation_of_pair(manifest: Manifest, name: PairName, data: PairData) -> Disagreement:
    assert data.pair is not None
    sides = sides_of(manifest, name, data)
    dtypes = sides.train_dtype, sides.infer_dtype
    rounding = rounding_floor(data.pair, *dtypes)
    rounds_coarsely = any(dtype.rounds_coarsely for dtype in dtypes)
    disagreement = Disagreement(
        data.pair,
        *dtypes,
        floor=floor_with_noise(data.pair, dtypes, rounding) if rounds_coarsely else rounding,
        prompt_lengths=data.prompt_lengths,
        has_experts=has_experts(sides.train.get("config", {})),
        ref_repeats_pi=not manifest.settings.pi(name[0]).logged,
        repeats_decode=sides.infer.get("decode_support") == sides.infer.get("replay_support"),
    )
    if data.prompt_start is None:
        return disagreement
    start = Disagreement(data.prompt_start, *dtypes, floor=disagreement.floor)
    floor = disagreement.logit_floor * root_mean_square(start.sensitivity)
    return replace(disagreement, prompt_start=replace(start, floor=floor))


RATIOS: Final[dict[str, Callable[[Floats], Floats]]] = {"kl_k3": k3_terms, "abs_logprob_diff": np.abs}
"""The metrics that are means over tokens, with the function of d that they average."""


def settings_contrast(
    settings: CompareSettings, pair: PairSummary, pairs: Sequence[PairSummary], data: Mapping[PairName, PairData]
) -> SettingsContrast | None:
    """The contrast of a pair with its counterpart: the nearest pair that shares one side, with the same dtypes.

    The counterpart differs from it in one setting; it is a pair of dtypes alone, or one earlier in `pairs`.

    Two training sides score the same responses, and their ratios are paired by token; two engines sample their own.
    None where there is no counterpart, or where the pair's own sides are only dtypes.
    """
    others = [other for number, other in enumerate(pairs) if other.is_of_dtypes or number < pairs.index(pair)]
    pairs_beside = [
        contrast for other in others if (contrast := _setting_contrast(settings, pair, other, data)) is not None
    ]
    return min(
        pairs_beside,
        key=lambda contrast: (settings.exact_counterpart(contrast.beside) is None, len(contrast.settings)),
        default=None,
    )


def _setting_contrast(
    settings: CompareSettings, pair: PairSummary, other: PairSummary, data: Mapping[PairName, PairData]
) -> SettingsContrast | None:
    if pair.train == other.train:
        ratios = {
            name: contrast(pair.metrics[name], other.metrics[name])
            for name in RATIOS
            if name in pair.metrics and name in other.metrics
        }
        return _contrast_of(other, "mu", settings.mu(pair.infer), settings.mu(other.infer), ratios)
    if pair.infer == other.infer:
        metric_ratios = _paired_ratios(
            data[pair.train, pair.infer], data[other.train, other.infer], settings.confidence
        )
        return _contrast_of(other, "pi", settings.pi(pair.train), settings.pi(other.train), metric_ratios)
    return None


def _contrast_of(
    other: PairSummary, role: Literal["pi", "mu"], side: Side, other_side: Side, ratios: Mapping[str, Estimate | None]
) -> SettingsContrast | None:
    settings = side.differs_from(other_side)
    if side.dtype != other_side.dtype or side.name == side.dtype or not settings:
        return None
    had = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return SettingsContrast(beside=(other.train, other.infer), side=role, settings=settings, ratios=had)


def _paired_ratios(first: PairData, second: PairData, level: float) -> dict[str, Estimate | None]:
    """The ratios on the responses that both pairs can use."""
    if first.pair is None or second.pair is None:
        return {}
    place = {row_id: row for row, row_id in enumerate(second.row_ids)}
    rows = [
        (row, place[row_id])
        for row, row_id in enumerate(first.row_ids)
        if row_id in place and first.is_complete(row) and second.is_complete(place[row_id])
    ]
    if not rows:
        return {}
    ours, theirs = (np.asarray(column) for column in zip(*rows, strict=True))
    common = first.pair.sequences
    sequences = Sequences.of_lengths(common.lengths[ours], common.clusters[ours])
    our_diff, their_diff = _diff_of_rows(first.pair, ours), _diff_of_rows(second.pair, theirs)
    return {
        name: paired_contrast(sequences, values(our_diff), values(their_diff), level) for name, values in RATIOS.items()
    }


def _diff_of_rows(pair: TokenPair, rows: Ints) -> Floats:
    """The values of d of the responses in these rows, one response after another."""
    by_response = rows_of(pair.diff, pair.sequences.offsets)
    return np.concatenate([by_response[row] for row in rows])
