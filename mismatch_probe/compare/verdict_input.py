"""What the verdict looks at, put together from a run's data and from the settings that its stages read back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.config.comparison import PairName
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.provenance.adapter import adapter_key
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.stats.results import RoutingCheck
from mismatch_probe.verdict.floors import exact_pair_agrees, rounding_floor
from mismatch_probe.verdict.ids import doubled_first_token, share_without
from mismatch_probe.verdict.preflight.facts import has_experts
from mismatch_probe.verdict.preflight.sides import Sides
from mismatch_probe.verdict.signatures.disagreement import Disagreement, root_mean_square


def sides_of(manifest: Manifest, name: PairName, data: PairData) -> Sides:
    """The settings both sides of a pair ran with, and what its prompts begin with."""
    pi, mu = manifest.settings.pi(name[0]), manifest.settings.mu(name[1])
    prompts, start = data.rollouts["prompt_token_ids"].to_pylist(), manifest.model.start_token
    return Sides(
        train_dtype=pi.dtype,
        infer_dtype=mu.dtype,
        train=_effective_settings(manifest, pi.stage("score")),
        infer=_effective_settings(manifest, mu.stage("sample")),
        checkpoints=(manifest.identity_of(pi), manifest.identity_of(mu)),
        difference=manifest.difference_of(pi, mu),
        doubled_first_token=doubled_first_token(prompts),
        lacking_start=None if start is None else (start[1], *share_without(start[0], prompts)),
    )


def _effective_settings(manifest: Manifest, stage: str) -> dict[str, Any]:
    """
    Raises:
        BrokenRecord: the manifest knows no such stage, or not the adapter that one names.
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
    """The deviations of every usable pair, each knowing what FP32 against FP32 has settled.

    routings: both sides' choice of experts, or why it was not compared.
    """
    judged = {}
    for name, pair_data in data.items():
        if pair_data.pair is not None:
            check = routings.get(name)
            disagreement = _disagreement(manifest, name, pair_data)
            judged[name] = replace(disagreement, routing=check if isinstance(check, RoutingCheck) else None)
    return {name: _settled(disagreement, exact_of(manifest, name, judged)) for name, disagreement in judged.items()}


def exact_of(manifest: Manifest, name: PairName, judged: Mapping[PairName, Disagreement]) -> Disagreement | None:
    """The pair that decides between bug and precision for another, None where none was run or it is not usable."""
    exact = manifest.settings.exact_counterpart(name)
    return None if exact is None else judged.get(exact)


def _settled(deviation: Disagreement, exact: Disagreement | None) -> Disagreement:
    if exact is None:
        return deviation
    agrees = exact_pair_agrees(exact)
    return replace(deviation, settled=not agrees, formats_alone=agrees)


def _disagreement(manifest: Manifest, name: PairName, data: PairData) -> Disagreement:
    assert data.pair is not None
    sides = sides_of(manifest, name, data)
    dtypes = sides.train_dtype, sides.infer_dtype
    disagreement = Disagreement(
        data.pair,
        *dtypes,
        floor=rounding_floor(data.pair, *dtypes),
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
