"""The comparison itself: generate, score the legs, record, summarise. The only room that moves a run forward."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from mismatch_probe.compare.children import run_job
from mismatch_probe.compare.events import AnyEvent, BatchDone, EffectiveSettings, StageDone, StageStarted
from mismatch_probe.compare.plan import DistributionsStage, Plan, Stage, make_plan
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.config.model import CompareSettings
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.rows import in_order, prompts_table
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import read_table, write_table

Listener = Callable[[AnyEvent], None]


def start_run(path: Path, preparation: Preparation) -> RunDirectory:
    """Make a run directory and record what is to be done.

    Raises:
        RunDirectoryError: the directory is in use.
        StorageError: the disk refused.
    """
    run = RunDirectory(path)
    run.create()
    run.write_manifest(preparation.manifest)
    write_table(run.prompts_path, prompts_table(preparation.prompts))
    return run


def resume_run(path: Path, preparation: Preparation) -> RunDirectory:
    """Open a run to continue it.

    Raises:
        RunDirectoryError: the run was made with another model, other prompts, settings or versions.
    """
    run = RunDirectory(path)
    recorded = run.read_manifest()
    now = preparation.manifest
    for name, key in recorded.content_keys.items():
        if now.content_keys[name] != key:
            what = _difference(recorded, now) if name in ("settings", "versions") else f"another {name} content"
            raise RunDirectoryError(f"{path} was made with {what}: resume with the same, or give another --out")
    write_table(run.prompts_path, prompts_table(preparation.prompts))
    return run


def execute(run: RunDirectory, listener: Listener) -> Summary:
    """Run every stage that is not recorded yet, then summarise.

    Raises:
        MismatchProbeError: a stage failed; whatever was recorded stays and `--resume` continues from it.
    """
    with run.locked():
        return write_summary(run, advance(run, listener))


def advance(run: RunDirectory, listener: Listener) -> Manifest:
    """Run every stage that is not recorded yet; the caller holds the run's lock.

    Raises:
        MismatchProbeError: a stage failed.
    """
    manifest = run.read_manifest()
    plan = make_plan(manifest.settings)
    recorder = _Recorder(run, manifest, listener)
    for job in plan.jobs:
        _collect(run, manifest, plan)
        if any(not _is_done(run, manifest, plan, stage) for stage in job.stages):
            run_job(run, job, recorder)
    _collect(run, manifest, plan)
    run.write_manifest(manifest)
    return manifest


def write_summary(run: RunDirectory, manifest: Manifest) -> Summary:
    """Summarise a run whose legs are recorded, and record that."""
    summary = summarise(run, manifest)
    run.write_summary(summary)
    return summary


class _Recorder:
    """Keeps the manifest in step with the events and passes them on."""

    def __init__(self, run: RunDirectory, manifest: Manifest, listener: Listener) -> None:
        self._run = run
        self._manifest = manifest
        self._listener = listener

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, StageStarted | EffectiveSettings | BatchDone | StageDone):
            record = self._manifest.stages[event.stage]
            if isinstance(event, StageStarted):
                record.state, record.batches, record.batches_done = "running", event.batches, event.batches_done
            elif isinstance(event, EffectiveSettings):
                record.effective_settings = event.settings
            elif isinstance(event, BatchDone):
                record.batches_done += 1
                record.tokens += event.tokens
                record.seconds += event.seconds
            else:
                record.state, record.note = ("skipped" if event.skipped else "done"), event.note
            self._run.write_manifest(self._manifest)
        self._listener(event)


def _is_done(run: RunDirectory, manifest: Manifest, plan: Plan, stage: Stage) -> bool:
    if manifest.stages[stage.name].state == "skipped":
        return True
    if _complete(run, manifest, stage):
        return True
    if isinstance(stage, DistributionsStage):
        return all(_is_done(run, manifest, plan, reader) for reader in plan.readers(stage))
    return run.leg_path(stage.leg).exists() and run.rollouts_path.exists()


def _collect(run: RunDirectory, manifest: Manifest, plan: Plan) -> None:
    """Merge the parts of finished stages into the final files; responses once every engine is done sampling."""
    sampled = all(_complete(run, manifest, stage) for stage in plan.sample_stages)
    if sampled and not run.rollouts_path.exists():
        tables = [_merged(run, manifest, stage, "rollouts") for stage in plan.sample_stages]
        write_table(run.rollouts_path, pa.concat_tables(tables).combine_chunks())
    if not run.rollouts_path.exists():
        return
    sampled_ids = read_table(run.rollouts_path, columns=["id"])["id"].to_pylist()
    for stage in plan.leg_stages:
        parts = run.parts(stage.name, stage.outputs)
        if not run.leg_path(stage.leg).exists() and _complete(run, manifest, stage):
            table = _merged(run, manifest, stage, stage.leg)
            scored = set(table["id"].to_pylist())
            write_table(run.leg_path(stage.leg), in_order(table, [one for one in sampled_ids if one in scored]))
        if run.leg_path(stage.leg).exists():
            parts.remove()
    for source in plan.distributions_stages:
        if all(_is_done(run, manifest, plan, reader) for reader in plan.readers(source)):
            run.parts(source.name, source.outputs).remove()


def _complete(run: RunDirectory, manifest: Manifest, stage: Stage) -> bool:
    batches = manifest.stages[stage.name].batches
    parts = run.parts(stage.name, stage.outputs)
    return batches > 0 and all(parts.is_done(number) for number in range(batches))


def _merged(run: RunDirectory, manifest: Manifest, stage: Stage, output: str) -> pa.Table:
    return run.parts(stage.name, stage.outputs).read(manifest.stages[stage.name].batches, output)


def _difference(recorded: Manifest, now: Manifest) -> str:
    old, new = _flat(recorded.settings), _flat(now.settings)
    changed = [f"{key} = {old.get(key)!r} (now {new.get(key)!r})" for key in old | new if old.get(key) != new.get(key)]
    if not changed:
        changed = [
            f"{name} {version} (now {now.versions.get(name)})"
            for name, version in recorded.versions.items()
            if now.versions.get(name) != version
        ]
    return ", ".join(changed) or f"a mismatch-probe ({recorded.tool_version}) that knew other settings"


def _flat(settings: CompareSettings) -> dict[str, object]:
    flat: dict[str, object] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else key, below)
        else:
            flat[prefix] = value

    walk("", settings.model_dump(mode="json"))
    return flat
