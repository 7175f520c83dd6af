"""More prompts for a finished run: the new ones are a run of their own inside it, merged when it is whole.

Nothing recorded is computed again. Legs are merged before the responses they belong to, so that the run can be read
at every moment, and merging twice is merging once.
"""

import shutil
from collections.abc import Sequence

from mismatch_probe.compare.continuation import as_prepared, in_present_form, of_sides
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.run import Listener, advance, write_summary
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.atomic import storage_errors
from mismatch_probe.records.legs import Legs, read_prompts, write_prompts, write_rollouts
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import prompts_of, read_table, with_rows

FOLDER = "extension"


def extend_run(run: RunDirectory, preparation: Preparation, listener: Listener) -> Summary:
    """Bring a finished run to the prompts of `preparation`, which begin with the run's own; an interrupted extension
    continues when it is asked for again.

    Raises:
        RunDirectoryError: the preparation is of another model, other settings, versions or prompts.
        MismatchProbeError: a stage failed; the run stays as it was.
    """
    with run.locked():
        manifest = in_present_form(run.read_manifest(), preparation.manifest)
        prompts = prompts_of(read_prompts(run, manifest.run_key))
        _check_continues(run, manifest, prompts, preparation)
        extension = RunDirectory(run.path / FOLDER)
        _open(extension, preparation, preparation.prompts[len(prompts) :])
        with extension.locked():
            extended = advance(extension, listener, manifest.stages)
        _merge(run, manifest, extension, extended)
        write_prompts(run, manifest.run_key, preparation.prompts)
        manifest = _extended(manifest, extended, len(prompts))
        run.write_manifest(manifest)
        shutil.rmtree(extension.path)
        return write_summary(run, manifest)


def _check_continues(
    run: RunDirectory, manifest: Manifest, prompts: Sequence[EncodedPrompt], preparation: Preparation
) -> None:
    new = preparation.manifest
    settings = manifest.settings.model_copy(update={"prompts": new.settings.prompts})
    same = {
        "model": manifest.content_keys.get("model") == new.content_keys["model"],
        "checkpoints or adapters of sides": of_sides(manifest) == of_sides(new),
        **{
            name: manifest.content_keys.get(key) == new.content_keys.get(key)
            for key, name in (
                ("versions", "package versions"),
                ("hardware", "hardware"),
                ("environment", "environment"),
            )
        },
        "settings": settings == new.settings,
        "prompts": [(prompt.prompt_id, prompt.token_ids) for prompt in prompts]
        == [(prompt.prompt_id, prompt.token_ids) for prompt in preparation.prompts[: len(prompts)]],
    }
    changes = [name for name, is_same in same.items() if not is_same]
    if changes:
        raise RunDirectoryError(f"{run.path} was made with other {', '.join(changes)}: it cannot be extended; run anew")


def _open(extension: RunDirectory, preparation: Preparation, prompts: list[EncodedPrompt]) -> None:
    """Continue an extension to the same prompts, or start it."""
    manifest = preparation.manifest
    if extension.is_run:
        extension_manifest = extension.read_manifest()
        if extension_manifest.content_keys == manifest.content_keys:
            manifest = as_prepared(extension_manifest, manifest)
        else:
            shutil.rmtree(extension.path)
    with storage_errors(extension.path):
        extension.path.mkdir(exist_ok=True)
    write_prompts(extension, manifest.run_key, prompts)
    extension.write_manifest(manifest)


def _merge(run: RunDirectory, manifest: Manifest, extension: RunDirectory, new_manifest: Manifest) -> None:
    legs, addition = Legs(run, manifest.run_key), Legs(extension, new_manifest.run_key)
    for stage in make_plan(manifest.settings).leg_stages:
        if addition.path(stage.leg).exists():
            new = addition.read(stage.leg)
            old = legs.read(stage.leg) if legs.path(stage.leg).exists() else new.slice(0, 0)
            legs.write(stage.leg, with_rows(old, new))
    rollouts = with_rows(read_table(run.rollouts_path), read_table(extension.rollouts_path))
    write_rollouts(run, manifest.run_key, rollouts)


def _extended(manifest: Manifest, new: Manifest, num_before: int) -> Manifest:
    """The manifest of both parts."""
    return manifest.model_copy(
        update={
            "settings": new.settings,
            "content_keys": new.content_keys,
            "stages": {
                name: manifest.stages.get(name, StageRecord(state="done")).followed_by(record)
                for name, record in new.stages.items()
            },
            "extended_from": [*manifest.extended_from, num_before],
        }
    )
