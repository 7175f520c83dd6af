"""What a run may be continued with: what can change a number is refused by name, what changes none is recorded."""

from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.compare.addition import manifest_with, pairs_to_add
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.side_checks import with_typed_engines
from mismatch_probe.config.nested import differences
from mismatch_probe.config.spelling import with_one_spelling, with_ranks_of
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.provenance import environment
from mismatch_probe.provenance.grounds import decisive
from mismatch_probe.records.manifest import Continuation, Manifest, StageRecord

_OF_SIDES: Final = ("checkpoint ", "adapter ")
"""Beginnings of the content keys of what single sides load."""

_HARMLESS_SETTINGS: Final = (
    "asked.",
    "by_layer",
    "bounded_by_probe.kv_cache_memory_bytes",
    "chosen_by_probe",
    "chunked_head_difference",
    "environment",
    "kv_cache_memory_bytes",
    "max_model_len",
    "num_kv_blocks",
    "ranks",
    "standing_answer.",
)
"""Beginnings of effective settings that follow free memory or a part's own prompts, say who chose another setting, are
measured anew, are held to elsewhere, or say how many ranks hold a model.
"""
_THREADS: Final = "num_threads"
_UNSAID_BEFORE: Final = {"tensor_parallel": 1}
"""Effective settings that earlier versions had and did not record."""


def as_recorded_now(manifest: Manifest, now: Manifest) -> Manifest:
    """The manifest with its settings as a run records them now.

    Earlier runs kept the text of a flag among their engine arguments and every spelling of a folder, and did not ask
    for the experts of any response. A reference gives the same bits layer by layer, and so do ranks with as many
    threads each, so a run may go on either way.
    """
    settings = with_ranks_of(now.settings, with_one_spelling(with_typed_engines(manifest.settings)))
    if settings.experts.num_sequences is None:
        settings = settings.model_copy(update={"experts": now.settings.experts})
    reference = settings.reference.model_copy(update={"by_layer": now.settings.reference.by_layer})
    settings = settings.model_copy(update={"reference": reference})
    return manifest.model_copy(update={"settings": settings})


def require_same(path: object, recorded: Manifest, now: Manifest) -> None:
    """More sides are no difference: they are added. Settings are compared one by one, as they would be recorded now.

    Raises:
        RunDirectoryError: the run was made with another checkpoint, other prompts, settings, packages, hardware or
            environment, or does not say with which.
    """
    recorded = as_recorded_now(recorded, now)
    now = manifest_with(now, now.settings.for_pairs(recorded.settings.pairs))
    for name, key in recorded.content_keys.items():
        if now.content_keys.get(name) != key and (not name.startswith(_OF_SIDES) or name in now.content_keys):
            what = ", ".join(_what_changed(name, recorded, now).values())
            if name == "settings" and not what:
                continue
            what = what or f"a mismatch-probe ({recorded.tool_version}) that knew other {name}"
            raise RunDirectoryError(f"{path} was made with {what}: resume with the same, or give another --out")
    unsaid = [name for name in now.content_keys if name not in recorded.content_keys and not name.startswith(_OF_SIDES)]
    if unsaid:
        raise RunDirectoryError(
            f"{path} does not say of which {', '.join(unsaid)} it was made, so nothing can be added to it: "
            "give another --out"
        )


def as_prepared(recorded: Manifest, now: Manifest) -> Manifest:
    """What was recorded, with the checkpoint and the settings that were just resolved and checked.

    Stages that an earlier version did not have are still to be done. The keys say that the settings are the same; what
    the jobs read of them is then none of whoever made the run directory.
    """
    settings = now.settings.for_pairs(recorded.settings.pairs)
    return recorded.model_copy(
        update={
            "model": now.model,
            "checkpoints": now.checkpoints,
            "checkpoint_differences": now.checkpoint_differences,
            "settings": settings,
            "stages": {stage.name: StageRecord() for stage in make_plan(settings).stages} | recorded.stages,
            "content_keys": recorded.content_keys | of_sides(now),
            "fp16_refused": now.fp16_refused,
        }
    )


def of_sides(manifest: Manifest) -> dict[str, str]:
    """The content keys of what single sides load."""
    return {name: key for name, key in manifest.content_keys.items() if name.startswith(_OF_SIDES)}


def continuation(recorded: Manifest, now: Manifest) -> Continuation:
    """The record of going on with a run: what is another now that changes no number, and which pairs are added."""
    names = {"environment", "versions", "hardware", "git"}
    there = {*recorded.settings.pairs, *pairs_to_add(recorded)}
    return Continuation(
        at=environment.now(),
        command=environment.command_given(),
        changed=list(_changes(recorded.model_dump(include=names), now.model_dump(include=names)).values()),
        added=[pair for pair in now.settings.pairs if pair not in there],
        infer=[side for side in now.settings.infer if side not in recorded.settings.infer],
        train=[side for side in now.settings.train if side not in recorded.settings.train],
    )


def later_settings(stage: str, first: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """How a later part's effective settings differ from the first part's.

    Raises:
        RunDirectoryError: in something that can change a number.
    """
    unsaid = {name: value for name, value in _UNSAID_BEFORE.items() if name in later}
    changes = _changes({**unsaid, **first}, later)
    harmless = _HARMLESS_SETTINGS if "cpu" in str(later.get("device", "cpu")) else (*_HARMLESS_SETTINGS, _THREADS)
    refused = {name: change for name, change in changes.items() if not name.startswith(harmless)}
    if refused:
        how = "go on where it runs as it did"
        if set(refused) == {_THREADS}:
            how = (
                "a CPU adds up in another order with another number of threads; go on with as many cores for each "
                "process (taskset, or as many ranks on a machine)"
            )
        raise RunDirectoryError(f"{stage} began with {', '.join(refused.values())}: {how}, or give another --out")
    return list(changes.values())


def _what_changed(name: str, recorded: Manifest, now: Manifest) -> dict[str, str]:
    if name == "settings":
        return _changes(*(manifest.settings.model_dump(mode="json") for manifest in (recorded, now)))
    if name.startswith(("model", "prompts", *_OF_SIDES)):
        return {name: f"another {name} content"}
    return _changes(
        *(decisive(manifest.versions, manifest.hardware, manifest.environment)[name] for manifest in (recorded, now))
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """What differs by its name, each as `name = before (now after)`."""
    return {name: f"{name} = {old!r} (now {new!r})" for name, old, new in differences(before, after)}
