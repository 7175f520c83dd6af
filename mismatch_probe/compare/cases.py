"""What the verdict looks at, put together from a run's data and from the settings that its stages read back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.verdict.floors import exact_pair_agrees, rounding_floor
from mismatch_probe.verdict.ids import doubled_first_token
from mismatch_probe.verdict.preflight.facts import has_experts
from mismatch_probe.verdict.preflight.sides import Sides
from mismatch_probe.verdict.signatures.disagreement import Disagreement, root_mean_square

PairName = tuple[Dtype, Dtype]


def sides_of(manifest: Manifest, name: PairName, data: PairData) -> Sides:
    """The settings both sides of a pair ran with, and what its prompts begin with."""
    train, infer = name
    return Sides(
        train_dtype=train,
        infer_dtype=infer,
        train=_effective_settings(manifest, f"score-train-{train}"),
        infer=_effective_settings(manifest, f"sample-{infer}"),
        doubled_first_token=doubled_first_token(data.rollouts["prompt_token_ids"].to_pylist()),
    )


def _effective_settings(manifest: Manifest, stage: str) -> dict[str, Any]:
    """
    Raises:
        BrokenRecord: the manifest knows no such stage.
    """
    if stage not in manifest.stages:
        raise BrokenRecord(f"the manifest says nothing of the stage {stage}, so it is damaged: compare again")
    return manifest.stages[stage].effective_settings


def disagreements(manifest: Manifest, data: Mapping[PairName, PairData]) -> dict[PairName, Disagreement]:
    """The deviations of every usable pair, each knowing what FP32 against FP32 has settled."""
    found = {name: _disagreement(manifest, name, one) for name, one in data.items() if one.pair is not None}
    exact = exact_of(found)
    if exact is None:
        return found
    agrees = exact_pair_agrees(exact)
    return {name: replace(one, settled=not agrees, formats_alone=agrees) for name, one in found.items()}


def exact_of(found: Mapping[PairName, Disagreement]) -> Disagreement | None:
    """The pair that decides between bug and precision, None where none was run."""
    return next((one for one in found.values() if one.is_exact), None)


def _disagreement(manifest: Manifest, name: PairName, data: PairData) -> Disagreement:
    assert data.pair is not None
    sides = sides_of(manifest, name, data)
    found = Disagreement(
        data.pair,
        *name,
        floor=rounding_floor(data.pair, *name),
        prompt_lengths=data.prompt_lengths,
        has_experts=has_experts(sides.train.get("config", {})),
        repeats_decode=sides.infer.get("decode_support") == sides.infer.get("replay_support"),
    )
    if data.start is None:
        return found
    start = Disagreement(data.start, *name, floor=found.floor)
    floor = found.logit_floor * root_mean_square(start.sensitivity)
    return replace(found, probe=replace(start, floor=floor))
