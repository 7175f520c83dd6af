"""More sides for a run: what is recorded stays, and only what the new pairs lack is computed.

What was begun is finished first. Then a new engine's side samples its own responses, a new side of the training path
scores those of the engines it is paired with, and a leg that other responses now belong to is given their rows.
"""

from mismatch_probe.compare.plan import Plan, make_plan
from mismatch_probe.compare.stages import DistributionsStage, LegStage, Stage, TrainingStage
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import sampler_of
from mismatch_probe.errors import MismatchProbeError
from mismatch_probe.provenance.keys import content_key
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table


def manifest_with(manifest: Manifest, settings: CompareSettings) -> Manifest:
    """The manifest as it would be had these settings been asked for; its stages stay."""
    if settings == manifest.settings:
        return manifest
    key = content_key(settings.model_dump(mode="json"))
    return manifest.model_copy(update={"settings": settings, "content_keys": manifest.content_keys | {"settings": key}})


def pairs_to_add(manifest: Manifest) -> list[PairName]:
    """The pairs that were asked for later and are not begun."""
    asked = dict.fromkeys(pair for continuation in manifest.continued for pair in continuation.added)
    return [pair for pair in asked if pair not in manifest.settings.pairs]


def with_added_pairs(manifest: Manifest) -> Manifest:
    """The manifest of a finished run with every pair that is to be added, and with the stages that they need.

    The sides are those of the last continuation, which names all that are not begun, as they were just prepared.
    """
    last = manifest.continued[-1]
    grown = manifest_with(manifest, manifest.settings.with_more(pairs_to_add(manifest), last.infer, last.train))
    before, after = make_plan(manifest.settings), make_plan(grown.settings)
    stages, growing = dict(manifest.stages), {}
    inputs = {stage.name: _inputs(before, stage) for stage in before.stages}
    for stage in after.stages:
        if inputs.get(stage.name) == _inputs(after, stage):
            continue
        if stage.name in inputs and stages[stage.name].state != "skipped":
            growing[stage.name] = stages[stage.name]
        stages[stage.name] = StageRecord()
    return grown.model_copy(update={"stages": stages, "growing": growing})


def without_side(manifest: Manifest, name: str, refusal: MismatchProbeError) -> Manifest:
    """The manifest without an engine's side that does not start, which it names with the reason.

    Raises:
        MismatchProbeError: the refusal itself, where no other side remains.
    """
    settings = manifest.settings.without_samplers({name})
    if settings is None:
        raise refusal
    smaller = manifest_with(manifest, settings)
    planned = {stage.name for stage in make_plan(settings).stages}
    stages = {stage: record for stage, record in manifest.stages.items() if stage in planned}
    continued = [
        past.model_copy(update={"added": [pair for pair in past.added if pair[1] != name]})
        for past in manifest.continued
    ]
    left_out = manifest.left_out | {name: str(refusal)}
    return smaller.model_copy(update={"stages": stages, "continued": continued, "left_out": left_out})


def is_recorded(run: RunDirectory, manifest: Manifest, stage: LegStage) -> bool:
    """Whether the leg of a stage is there, with the rows of every sampler."""
    return run.leg_path(stage.leg).exists() and stage.name not in manifest.growing


def samplers_left(run: RunDirectory, stage: TrainingStage) -> tuple[str, ...]:
    """The samplers of a stage whose responses its leg has no row of."""
    path = run.leg_path(stage.leg)
    if not path.exists():
        return stage.samplers
    scored = {sampler_of(row_id) for row_id in read_table(path, columns=["id"])["id"].to_pylist()}
    return tuple(sampler for sampler in stage.samplers if sampler not in scored)


def _inputs(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """What a stage has to do more for when it grows: samplers that it scores, or stages that read what it leaves."""
    if isinstance(stage, DistributionsStage):
        return tuple(reader.name for reader in plan.readers(stage))
    return stage.samplers if isinstance(stage, TrainingStage) else ()
