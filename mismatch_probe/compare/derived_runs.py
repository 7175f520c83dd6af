"""Runs made from a finished run: more prompts for it, or its responses scored with the settings of another run.

An extension is a run of its own inside the finished one, merged when it is complete. It computes nothing again that is
recorded. Legs are merged before the responses they belong to, so that the run can be read at every moment, and a
second merge changes nothing.

Rescoring puts the same token ids on both sides of a comparison of runs. The new run samples nothing: its engine's
log-probs are those of a prefill of the ids, the training path scores them as usual, and it can be resumed, reported and
judged like any other run.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.compare.continuation import as_prepared, in_present_form, side_keys
from mismatch_probe.compare.plan import plan_of
from mismatch_probe.compare.preparation import Preparation, identity_of_prompt, prepare
from mismatch_probe.compare.run import EventListener, advance, conclude, resume_run, start_run
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.resuming import code_flags
from mismatch_probe.config.sides import Side, response_of
from mismatch_probe.errors import RunDirectoryError, UsageError
from mismatch_probe.inert import words_line
from mismatch_probe.provenance.environment import RESPONSES, content_key, decisive, same_instructions
from mismatch_probe.records.files import storage_errors
from mismatch_probe.records.legs import Legs, read_prompts, write_prompts, write_rollouts
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import prompts_of, read_table, with_rows

FOLDER = "extension"


def extend_run(run: RunDirectory, preparation: Preparation, listener: EventListener) -> Summary:
    """Extend a finished run to the prompts of `preparation`, which begin with the run's own prompts.

    The same call continues an interrupted extension.
    """
    with run.lock():
        manifest = in_present_form(run.read_manifest(), preparation.manifest)
        prompts = prompts_of(read_prompts(run, manifest.run_key))
        _require_own_extension(run, manifest, prompts, preparation)
        extension = RunDirectory(run.path / FOLDER)
        _open_extension(extension, preparation, preparation.prompts[len(prompts) :])
        with extension.lock():
            result = advance(extension, listener, manifest.stages)
        _merge_extension(run, manifest, extension, result)
        write_prompts(run, manifest.run_key, preparation.prompts)
        manifest = _extended_manifest(manifest, result, len(prompts))
        run.write_manifest(manifest)
        shutil.rmtree(extension.path)
        return conclude(run, manifest, listener)


def _require_own_extension(
    run: RunDirectory, manifest: Manifest, prompts: Sequence[EncodedPrompt], preparation: Preparation
) -> None:
    new = preparation.manifest
    settings = manifest.settings.model_copy(update={"prompts": new.settings.prompts})
    same = {
        "model": manifest.content_keys.get("model") == new.content_keys["model"],
        "checkpoints or adapters of sides": side_keys(manifest) == side_keys(new),
        **{
            name: manifest.content_keys.get(key) == new.content_keys.get(key)
            for key, name in (
                ("versions", "package versions"),
                ("hardware", "hardware"),
                ("environment", "environment"),
            )
        },
        "instruction sets": same_instructions(manifest.hardware, new.hardware),
        "settings": settings == new.settings,
        "prompts": list(map(identity_of_prompt, prompts))
        == list(map(identity_of_prompt, preparation.prompts[: len(prompts)])),
    }
    changes = [name for name, is_same in same.items() if not is_same]
    if changes:
        raise RunDirectoryError(f"{run.path} was made with other {', '.join(changes)}: it cannot be extended; run anew")


def _open_extension(extension: RunDirectory, preparation: Preparation, prompts: list[EncodedPrompt]) -> None:
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


def _merge_extension(run: RunDirectory, manifest: Manifest, extension: RunDirectory, new_manifest: Manifest) -> None:
    """Add the rows of the extension. What was measured of rounding in FP32 is measured again, if it is still needed."""
    legs, addition = Legs(run, manifest.run_key), Legs(extension, new_manifest.run_key)
    for stage in plan_of(manifest).leg_stages:
        if addition.path(stage.leg).exists():
            new = addition.read(stage.leg)
            old = legs.read(stage.leg) if legs.path(stage.leg).exists() else new.slice(0, 0)
            legs.write(stage.leg, with_rows(old, new))
        elif stage.name not in new_manifest.stages:
            legs.path(stage.leg).unlink(missing_ok=True)
    rollouts = with_rows(read_table(run.rollouts_path), read_table(extension.rollouts_path))
    write_rollouts(run, manifest.run_key, rollouts)


def _extended_manifest(manifest: Manifest, new: Manifest, num_before: int) -> Manifest:
    """The manifest of the run with both parts."""
    return manifest.model_copy(
        update={
            "settings": new.settings,
            "content_keys": new.content_keys,
            "hardware": new.hardware,
            "stages": {
                name: manifest.stages.get(name, StageRecord(state="done")).followed_by(record)
                for name, record in new.stages.items()
            },
            "extended_from": [*manifest.extended_from, num_before],
            "rounding_checks": [],
            "images": new.images,
        }
    )


_SHAPE_MU = ("temperature", "top_p", "top_k")


def open_rescoring(
    path: Path, responses: RunDirectory, settings_of: RunDirectory, *, trust_remote_code: bool = False
) -> RunDirectory:
    """Make or continue the run at `path`, which scores the responses of one run with the settings of another.

    Code is trusted by `trust_remote_code` of this call, not by the run directories.

    Raises:
        UsageError: the settings run code that is not trusted now, do not fit the responses, or belong to other packages
            than are installed.
        RunDirectoryError: a run is not there, or `path` holds something else.
    """
    first, second = responses.read_manifest(), settings_of.read_manifest()
    settings = _rescoring_settings(first, second, responses.path, settings_of.path)
    runs_code = code_flags(settings.model_dump())
    if runs_code and not trust_remote_code:
        raise UsageError(
            f"{settings_of.path} was made with {words_line(*runs_code)}: what runs code is not taken from a run "
            "directory; give --trust-remote-code if you trust it"
        )
    sources = [(mu, _source_of_responses(first, mu, responses)) for mu in settings.infer_sides]
    preparation = prepare(settings)
    _require_equal_prompts(first, preparation, responses.path, settings_of.path)
    _require_equal_packages(second, preparation.manifest, settings_of.path)
    rollouts = _rollouts_to_score(read_table(responses.rollouts_path), sources)
    note = f"the responses are those of {responses.path}, and mu's log-probs those of a prefill"
    manifest = without_sampling(preparation.manifest, note, rollouts)
    preparation = replace(preparation, manifest=manifest)
    run = (resume_run if RunDirectory(path).is_run else start_run)(path, preparation)
    write_rollouts(run, run.read_manifest().run_key, rollouts)
    return run


def rescore(run: RunDirectory, listener: EventListener) -> Summary:
    """Run every stage that is not recorded yet, then summarise."""
    with run.lock():
        manifest = advance(run, listener)
        for mu in manifest.settings.infer_sides:
            if mu.logged:
                continue
            settings = manifest.stages[mu.stage("replay")].effective_settings
            manifest.stages[mu.stage("sample")].effective_settings = settings
        run.write_manifest(manifest)
        return conclude(run, manifest, listener)


def _rescoring_settings(first: Manifest, second: Manifest, responses: Path, settings_of: Path) -> CompareSettings:
    """The settings of the second run, with the prompts and the sampling of the first."""
    for name in _SHAPE_MU:
        was, present = getattr(first.settings.sampling, name), getattr(second.settings.sampling, name)
        if was != present:
            raise UsageError(
                f"{responses} was sampled with {name} = {was}, {settings_of} with {present}: the same tokens have "
                f"other probabilities by intent; give two runs with the same {name}"
            )
    engine = second.settings.engine.model_copy(update={"prefill": True})
    settings = second.settings.model_copy(
        update={
            "prompts": first.settings.prompts,
            "sampling": first.settings.sampling,
            "engine": engine,
            "infer": tuple(
                side if side.url is not None else side.model_copy(update={"prefill": None})
                for side in second.settings.infer
            ),
        }
    )
    for mu in settings.infer_sides:
        if mu.engine is not None and not mu.engine.prefill:
            raise UsageError(
                f"the side {mu.name} of {settings_of} is a server that was not asked for prompt log-probs, so it "
                f"scores no responses of another run; make {settings_of} again with prefill=true there"
            )
    return settings


def _source_of_responses(first: Manifest, mu: Side, responses: RunDirectory) -> Side:
    """The side whose responses an engine scores: the side of its name, or the only one."""
    sides = {side.name: side for side in first.settings.infer_sides}
    if mu.name not in sides and len(sides) > 1:
        raise UsageError(
            f"{responses.path} has responses of {', '.join(sides)} and none of {mu.name}: which to score with "
            f"{mu.name} is open; give a run with that side, or with one alone"
        )
    source = sides.get(mu.name) or first.settings.infer_sides[0]
    if not responses.leg_path(source.leg("prefill")).exists():
        raise UsageError(
            f"{responses.path} has no log-probs of its engine by prefill, and another engine's prefill cannot be set "
            "against its decoding; make it again with engine.prefill = true"
        )
    return source


def _require_equal_prompts(first: Manifest, preparation: Preparation, responses: Path, settings_of: Path) -> None:
    if first.content_keys.get("prompts") != preparation.manifest.content_keys["prompts"]:
        raise UsageError(
            f"the prompts of {responses} come out with other token ids under the settings of {settings_of} (another "
            "tokenizer, chat template or source): its responses cannot be scored there"
        )


def _require_equal_packages(second: Manifest, present: Manifest, settings_of: Path) -> None:
    was, versions = (decisive(manifest.versions, {}, {})["versions"] for manifest in (second, present))
    changes = [f"{name} {was.get(name, 'absent')}" for name in was | versions if was.get(name) != versions.get(name)]
    if changes:
        raise UsageError(
            f"{settings_of} was made with {', '.join(changes)}, which is not what is installed here: rescore where it "
            "was made, or make it again here"
        )


def _rollouts_to_score(rollouts: pa.Table, sources: Sequence[tuple[Side, Side]]) -> pa.Table:
    """The responses of each source, renamed to the engine that scores them."""
    tables = [
        rows_of_side(rollouts.filter(pc.equal(rollouts["sampler"], source.sampler)), mu) for mu, source in sources
    ]
    return pa.concat_tables(tables).combine_chunks()


def rows_of_side(rows: pa.Table, mu: Side) -> pa.Table:
    """The responses, renamed to the engine's side that scores them."""
    ids = [mu.row_of(response_of(row_id)) for row_id in rows["id"].to_pylist()]
    columns = {"id": pa.array(ids), "sampler": pa.array([mu.sampler] * rows.num_rows)}
    for name, column in columns.items():
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return rows


def without_sampling(manifest: Manifest, note: str, rollouts: pa.Table) -> Manifest:
    """The manifest of a run that does not sample its responses."""
    records = {mu.stage("sample"): StageRecord(state="skipped", note=note) for mu in manifest.settings.infer_sides}
    key = content_key(rollouts.select(["id", "prompt_token_ids", "token_ids"]).to_pylist())
    return manifest.model_copy(
        update={"stages": manifest.stages | records, "content_keys": manifest.content_keys | {RESPONSES: key}}
    )
