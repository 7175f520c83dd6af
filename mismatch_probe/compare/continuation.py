"""The continuation of an interrupted or finished run: which settings may differ, and which sides may be added.

Stages that have begun are finished first. Then a new engine's side samples its own responses, a new side of the
training path scores the responses of its engines, and a leg that now covers more responses grows by their rows.
"""

from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.compare.plan import Plan, make_plan, plan_of
from mismatch_probe.compare.preflight import with_typed_engines
from mismatch_probe.compare.stages import DistributionsStage, LegStage, Stage, TrainingStage
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.resuming import with_one_spelling, with_ranks_of
from mismatch_probe.config.sides import sampler_of
from mismatch_probe.errors import MismatchProbeError, RunDirectoryError
from mismatch_probe.provenance import environment
from mismatch_probe.provenance.environment import (
    CPU_INSTRUCTIONS,
    PACKAGE_KEY,
    content_key,
    decisive,
    same_instructions,
)
from mismatch_probe.reading import differences
from mismatch_probe.records.manifest import Continuation, Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table


def manifest_with(manifest: Manifest, settings: CompareSettings) -> Manifest:
    """The manifest with these settings and the keys that follow from them; its stages stay."""
    if settings == manifest.settings:
        return manifest
    key = content_key(settings.model_dump(mode="json"))
    return manifest.model_copy(update={"settings": settings, "content_keys": manifest.content_keys | {"settings": key}})


def pairs_to_add(manifest: Manifest) -> list[PairName]:
    """The pairs that a continuation added and that have not begun."""
    requests = dict.fromkeys(pair for continuation in manifest.continued for pair in continuation.added)
    return [pair for pair in requests if pair not in manifest.settings.pairs]


def with_added_pairs(manifest: Manifest) -> Manifest:
    """The manifest of a finished run with every pair to add, and with the stages that they need.

    The sides are those of the last continuation, which names all sides that have not begun.
    """
    last = manifest.continued[-1]
    larger = manifest_with(manifest, manifest.settings.with_more(pairs_to_add(manifest), last.infer, last.train))
    old_plan, new_plan = plan_of(manifest), plan_of(larger)
    stages, growing_stages = dict(manifest.stages), {}
    inputs = {stage.name: _inputs_of_stage(old_plan, stage) for stage in old_plan.stages}
    for stage in new_plan.stages:
        if inputs.get(stage.name) == _inputs_of_stage(new_plan, stage):
            continue
        if stage.name in inputs and stages[stage.name].state != "skipped":
            growing_stages[stage.name] = stages[stage.name]
        stages[stage.name] = StageRecord()
    return larger.model_copy(update={"stages": stages, "growing": growing_stages})


def without_side(manifest: Manifest, name: str, refusal: MismatchProbeError) -> Manifest:
    """The manifest without an engine's side that does not start; it records the reason.

    Raises:
        MismatchProbeError: the refusal itself, where no other side remains.
    """
    settings = manifest.settings.without_samplers({name})
    if settings is None:
        raise refusal
    smaller = manifest_with(manifest, settings)
    names = {stage.name for stage in plan_of(smaller).stages}
    stages = {stage: record for stage, record in manifest.stages.items() if stage in names}
    continuations = [
        past.model_copy(update={"added": [pair for pair in past.added if pair[1] != name]})
        for past in manifest.continued
    ]
    reasons = manifest.left_out | {name: str(refusal)}
    return smaller.model_copy(update={"stages": stages, "continued": continuations, "left_out": reasons})


def is_recorded(run: RunDirectory, manifest: Manifest, stage: LegStage) -> bool:
    """Whether the leg of a stage exists with the rows of every sampler."""
    return run.leg_path(stage.leg).exists() and stage.name not in manifest.growing


def samplers_left(run: RunDirectory, stage: TrainingStage) -> tuple[str, ...]:
    """The samplers of a stage whose responses are missing in its leg."""
    path = run.leg_path(stage.leg)
    if not path.exists():
        return stage.samplers
    recorded_samplers = {sampler_of(row_id) for row_id in read_table(path, columns=["id"])["id"].to_pylist()}
    return tuple(sampler for sampler in stage.samplers if sampler not in recorded_samplers)


def _inputs_of_stage(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """The inputs that make a stage grow: the samplers that it scores, or the stages that read its parts."""
    if isinstance(stage, DistributionsStage):
        return tuple(reader.name for reader in plan.readers(stage))
    return stage.samplers if isinstance(stage, TrainingStage) else ()


_OF_SIDES: Final = ("checkpoint ", "adapter ")
"""The beginnings of the content keys of checkpoints and adapters that single sides load."""

_HARMLESS_SETTINGS: Final = (
    "agreement_with_itself", "asked.", "by_layer", "bounded_by_probe.kv_cache_memory_bytes", "chosen_by_probe",
    "chunked_head_difference", "environment", "kv_cache_memory_bytes", "max_model_len", "num_kv_blocks", "ranks",
    "standing_answer.",
)  # fmt: skip
"""The beginnings of effective settings that may differ: they follow free memory or the prompts of a part, are measured
anew, are checked elsewhere, or count the ranks that hold a model.
"""
_THREADS: Final = "num_threads"
_NOT_RECORDED_BEFORE: Final = {"tensor_parallel": 1, "bf16_products": "native"}
"""Effective settings of earlier versions, which did not record them."""


def in_present_form(manifest: Manifest, new: Manifest) -> Manifest:
    """The manifest with its settings as a run records them now.

    Earlier runs kept the text of a flag among their engine arguments and every spelling of a folder, and did not ask
    for the experts of any response. A reference gives the same bits layer by layer, and so do ranks with as many
    threads each, so a run may go on either way.
    """
    settings = with_ranks_of(new.settings, with_one_spelling(with_typed_engines(manifest.settings)))
    if settings.experts.num_sequences is None:
        settings = settings.model_copy(update={"experts": new.settings.experts})
    reference = settings.reference.model_copy(update={"by_layer": new.settings.reference.by_layer})
    settings = settings.model_copy(update={"reference": reference})
    return manifest.model_copy(update={"settings": settings})


def require_same(path: object, old: Manifest, new: Manifest) -> None:
    """Require that a run can be continued: settings are compared one by one, as they would be recorded now.

    Additional sides are not a difference: they are added.

    Raises:
        RunDirectoryError: the run was made with another checkpoint, other prompts, settings, packages, hardware or
            environment, or does not say with which.
    """
    old = in_present_form(old, new)
    new = manifest_with(new, new.settings.for_pairs(old.settings.pairs))
    if not same_instructions(old.hardware, new.hardware):
        old_sets, new_sets = (manifest.hardware[CPU_INSTRUCTIONS] for manifest in (old, new))
        raise RunDirectoryError(
            f"{path} was made on a processor with the instruction sets {old_sets} (now {new_sets}), by which "
            "kernels round: resume on such a one, or give another --out"
        )
    for name, key in old.content_keys.items():
        if new.content_keys.get(name) != key and (not name.startswith(_OF_SIDES) or name in new.content_keys):
            what = ", ".join(_change_text(name, old, new).values())
            if name == "settings" and not what:
                continue
            what = what or f"a mismatch-probe ({old.tool_version}) that knew other {name}"
            raise RunDirectoryError(f"{path} was made with {what}: resume with the same, or give another --out")
    unsaid = [name for name in new.content_keys if name not in old.content_keys and not name.startswith(_OF_SIDES)]
    if unsaid:
        raise RunDirectoryError(
            f"{path} does not say of which {', '.join(unsaid)} it was made, so nothing can be added to it: "
            "give another --out"
        )


def as_prepared(old: Manifest, new: Manifest) -> Manifest:
    """The recorded manifest with the checkpoint and the settings that were just resolved and checked.

    Stages that an earlier version did not have are still to be done. The keys show that the settings are equal, and
    jobs then read the settings of this command, not those of the run directory.
    """
    settings = new.settings.for_pairs(old.settings.pairs)
    return old.model_copy(
        update={
            "model": new.model,
            "checkpoints": new.checkpoints,
            "checkpoint_differences": new.checkpoint_differences,
            "settings": settings,
            "stages": {stage.name: StageRecord() for stage in make_plan(settings).stages} | old.stages,
            "content_keys": old.content_keys | side_keys(new),
            "fp16_refused": new.fp16_refused,
        }
    )


def with_checks_to_repeat(manifest: Manifest) -> Manifest:
    """The manifest whose checks of rounding that failed are to be tried again: there may be memory for them by now."""
    checks = [stage.name for job in plan_of(manifest).jobs if job.is_rounding_check for stage in job.stages]
    failures = [name for name in checks if manifest.stages[name].state == "skipped"]
    return manifest.model_copy(update={"stages": manifest.stages | {name: StageRecord() for name in failures}})


def side_keys(manifest: Manifest) -> dict[str, str]:
    """The content keys of the checkpoints and adapters that single sides load."""
    return {name: key for name, key in manifest.content_keys.items() if name.startswith(_OF_SIDES)}


def continuation(old: Manifest, new: Manifest) -> Continuation:
    """The record of a continuation: the differences that change no number, and the pairs that are added."""
    names = {"environment", "versions", "hardware", "git"}
    old_pairs = {*old.settings.pairs, *pairs_to_add(old)}
    return Continuation(
        at=environment.utc_now(),
        command=environment.command_given(),
        changed=list(_change_texts(old.model_dump(include=names), new.model_dump(include=names)).values()),
        added=[pair for pair in new.settings.pairs if pair not in old_pairs],
        infer=[side for side in new.settings.infer if side not in old.settings.infer],
        train=[side for side in new.settings.train if side not in old.settings.train],
    )


def later_settings(stage: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The differences between a later part's effective settings and the first part's.

    Raises:
        RunDirectoryError: a difference can change a number.
    """
    unsaid = {name: value for name, value in _NOT_RECORDED_BEFORE.items() if name in second}
    changes = _change_texts({**unsaid, **first}, second)
    harmless = _HARMLESS_SETTINGS if "cpu" in str(second.get("device", "cpu")) else (*_HARMLESS_SETTINGS, _THREADS)
    refusals = {name: change for name, change in changes.items() if not name.startswith(harmless)}
    if refusals:
        how = "go on where it runs as it did"
        if set(refusals) == {_THREADS}:
            how = (
                "a CPU adds up in another order with another number of threads; go on with as many cores for each "
                "process (taskset, or as many ranks on a machine)"
            )
        raise RunDirectoryError(f"{stage} began with {', '.join(refusals.values())}: {how}, or give another --out")
    return list(changes.values())


def _change_text(name: str, old: Manifest, new: Manifest) -> dict[str, str]:
    if name == "settings":
        return _change_texts(*(manifest.settings.model_dump(mode="json") for manifest in (old, new)))
    if name.startswith(("model", "prompts", *_OF_SIDES)):
        return {name: f"another {name} content"}
    if name.startswith(PACKAGE_KEY):
        package = name.removeprefix(PACKAGE_KEY)
        return _change_texts(*({package: manifest.versions.get(package)} for manifest in (old, new)))
    return _change_texts(
        *(decisive(manifest.versions, manifest.hardware, manifest.environment)[name] for manifest in (old, new))
    )


def _change_texts(old_plan: Mapping[str, Any], new_plan: Mapping[str, Any]) -> dict[str, str]:
    """The differences, each as `name = before (now after)`."""
    return {name: f"{name} = {old!r} (now {new!r})" for name, old, new in differences(old_plan, new_plan)}
