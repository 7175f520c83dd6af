"""The run of a comparison: each job in a process of its own, its events in the manifest, then the summary."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from mismatch_probe.children import start
from mismatch_probe.children.job import JobFunction
from mismatch_probe.children.messages import Send
from mismatch_probe.children.servers import Preload
from mismatch_probe.children.start import Job, RankPlace, in_place, places_here, run_together
from mismatch_probe.compare.continuation import (
    as_prepared,
    continuation,
    is_recorded,
    later_settings,
    pairs_to_add,
    require_same,
    with_added_pairs,
    with_checks_to_repeat,
    without_side,
)
from mismatch_probe.compare.plan import (
    AnyEvent,
    BatchDone,
    EffectiveSettings,
    JobStarted,
    Plan,
    PlannedJob,
    StageDone,
    StageStarted,
    parse,
    plan_of,
)
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import DistributionsStage, Stage
from mismatch_probe.compare.summarise import sides_to_check, summarise
from mismatch_probe.compare.torchrun import current
from mismatch_probe.engines.start import engine_provider, start_engine
from mismatch_probe.errors import (
    EngineError,
    MismatchProbeError,
    RunDirectoryError,
    StartRefused,
    UsageError,
    message_of,
)
from mismatch_probe.records.legs import Legs, read_prompts, write_prompts, write_rollouts
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import in_order, read_table, with_rows


def run_over_ranks(job: Job, follow: JobFunction, num_ranks: int, on_message: Callable[[Any], None]) -> None:
    """Run the job as the first rank, while the other ranks run the function `follow`."""
    torchrun = current()
    if torchrun is not None:
        torchrun.run(job, follow, on_message)
        return
    following = replace(job, function=follow, arguments=(), log=None)
    with places_here(num_ranks) as places:
        first, *others = (in_place(following if place.rank else job, place) for place in places)
        run_together(first, others, on_message)


_WHEN_KILLED: Final = {
    True: "free memory and continue with --resume, or start anew with a lower --max-new-tokens or a smaller cache",
    False: "hold one layer of the reference at a time (--resume --reference-by-layer), or start anew with a lower "
    "--max-new-tokens or training.batch_tokens",
}
"""The advice for a killed job, by whether it holds an engine."""


def _preload(job: PlannedJob) -> Preload:
    """The imports that its process is forked from."""
    if not job.starts_engine:
        return "training"
    engine = job.stages[0].side.engine
    return "training" if engine is None else engine_provider(engine.name).preload


def run_planned_job(run: RunDirectory, job: PlannedJob, on_event: Callable[[AnyEvent], None]) -> None:
    child = start.Job(
        name=job.name,
        function=run_recorded,
        arguments=(str(run.path.absolute()), job.name),
        preload=_preload(job),
        when_killed=_WHEN_KILLED[job.starts_engine],
        log=run.log_path(job.name),
    )
    if job.num_ranks:
        follow = follow_engine if job.starts_engine else follow_scorer
        run_over_ranks(child, follow, job.num_ranks, lambda message: on_event(parse(message)))
    else:
        start.run(child, lambda message: on_event(parse(message)))


def run_recorded(events: Send, run_path: str, job_name: str, place: dict[str, Any] | None = None) -> None:
    """Run a job of the run in `run_path` until all its stages are recorded; a child process calls it."""
    run = RunDirectory(Path(run_path))
    manifest = run.read_manifest()
    job = plan_of(manifest).job(job_name)
    if job.process == "training":
        from mismatch_probe.compare.scoring_job import run_scoring, run_scoring_over_ranks

        if place is None:
            run_scoring(run, manifest, job, events)
        else:
            run_scoring_over_ranks(run, manifest, job, events, RankPlace.from_json(place))
    else:
        from mismatch_probe.compare.engine_job import run_engine

        if place is None:
            run_engine(run, manifest, job, events)
            return
        from mismatch_probe.compare.engine_job import run_engine_over_ranks

        run_engine_over_ranks(run, manifest, job, events, RankPlace.from_json(place))


def follow_scorer(send: Send, place: dict[str, Any]) -> None:
    """What a rank but the first does while that one scores."""
    from mismatch_probe.training_path.scorer import follow

    follow(RankPlace.from_json(place))


def follow_engine(send: Send, place: dict[str, Any]) -> None:
    """What a rank but the first does until that one closes its engine, which takes the group down with it."""
    from mismatch_probe.training_path.rank_group import follow_first

    follow_first(RankPlace.from_json(place), start_engine, ends_with_close=True)


EventListener = Callable[[AnyEvent], None]


class Recorder:
    """Updates the manifest from the events and passes them on.

    A stage keeps the settings with which it began, in this run or in the run that it is merged into (`records_before`).
    A later part with other settings leaves a note, or is stopped by the RunDirectoryError of `later_settings`.
    """

    def __init__(
        self, run: RunDirectory, manifest: Manifest, listener: EventListener, records_before: Mapping[str, StageRecord]
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._listener = listener
        self._records_before = records_before
        self._read_back: dict[str, dict[str, Any]] = {}
        self._idle_since = time.monotonic()

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, EffectiveSettings):
            self._read_back[event.stage] = event.settings
        elif isinstance(event, StageStarted | BatchDone | StageDone):
            record = self._manifest.stages[event.stage]
            if isinstance(event, StageStarted):
                record.state, record.batches, record.batches_done = "running", event.batches, event.batches_done
                record.start_seconds = time.monotonic() - self._idle_since
                self._update_record(event.stage, record)
            elif isinstance(event, BatchDone):
                record.batches_done += 1
                record.tokens += event.tokens
                record.seconds += event.seconds
            else:
                record.state, record.note = ("skipped" if event.skipped else "done"), event.note
                self._idle_since = time.monotonic()
            self._run.write_manifest(self._manifest)
        self._listener(event)

    def _update_record(self, stage: str, record: StageRecord) -> None:
        settings = self._read_back.get(stage, {})
        began = record if record.batches_done else self._records_before.get(stage, StageRecord())
        if began.effective_settings and settings:
            record.later_settings += later_settings(stage, began.effective_settings, settings)
        if began is not record:
            record.effective_settings = settings


def start_run(
    path: Path, preparation: Preparation, write_first: Callable[[RunDirectory], None] = lambda run: None
) -> RunDirectory:
    """Make a run directory and record its stages; `write_first` writes the files of a run of another kind."""
    run = RunDirectory(path)
    with run.create():
        write_first(run)
        write_prompts(run, preparation.manifest.run_key, preparation.prompts)
        run.write_manifest(preparation.manifest)
    return run


def resume_run(path: Path, preparation: Preparation) -> RunDirectory:
    """Open a run to continue it: pairs that it lacks are recorded for addition, checks that failed are tried again."""
    run = RunDirectory(path)
    with run.lock():
        old, new = run.read_manifest(), preparation.manifest
        require_same(path, old, new)
        if run.prompts_path.exists():
            read_prompts(run, old.run_key)
        old = with_checks_to_repeat(as_prepared(old, new))
        old.continued.append(continuation(old, new))
        old.left_out.update(new.left_out)
        write_prompts(run, old.run_key, preparation.prompts)
        run.write_manifest(old)
    return run


def execute(run: RunDirectory, listener: EventListener) -> Summary:
    """Run every stage that is not recorded yet, then summarise."""
    with run.lock():
        return conclude(run, advance(run, listener), listener)


def advance(
    run: RunDirectory, listener: EventListener, records_before: Mapping[str, StageRecord] | None = None
) -> Manifest:
    """Run every stage that is not recorded yet; the caller holds the run's lock.

    `records_before` are the stages of the run that this one is merged into.
    """
    manifest = _run_without_refused_sides(run, run.read_manifest(), listener, records_before or {})
    if pairs_to_add(manifest):
        manifest = with_added_pairs(manifest)
        run.write_manifest(manifest)
        manifest = _run_without_refused_sides(run, manifest, listener, {})
    return manifest


class _SideRefusal(Exception):  # noqa: N818 - not the end of the run
    """Raised where the engine of the side `name` does not start."""

    def __init__(self, name: str, error: StartRefused) -> None:
        self.name, self.error = name, error


def _run_without_refused_sides(
    run: RunDirectory, manifest: Manifest, listener: EventListener, records_before: Mapping[str, StageRecord]
) -> Manifest:
    """Run every stage and return the manifest; sides whose engine does not start are left out where others remain."""
    while True:
        try:
            _run_stages(run, manifest, listener, records_before)
        except _SideRefusal as refusal:
            manifest = without_side(manifest, refusal.name, refusal.error)
            run.write_manifest(manifest)
        else:
            return manifest


def _run_stages(
    run: RunDirectory, manifest: Manifest, listener: EventListener, records_before: Mapping[str, StageRecord]
) -> None:
    plan = plan_of(manifest)
    recorder = Recorder(run, manifest, listener, {**records_before, **manifest.growing})
    _drop_parts_of_unknown_settings(run, manifest, plan)
    for job in plan.jobs:
        _collect_finished(run, manifest, plan)
        names = [stage.name for stage in job.stages if not _is_stage_done(run, manifest, plan, stage)]
        if names:
            listener(JobStarted(process=job.process, stages=names))
            try:
                run_planned_job(run, job, recorder)
            except (EngineError, UsageError) as error:
                if job.is_rounding_check and not isinstance(error, RunDirectoryError):
                    _leave_out(run, manifest, job, error)
                elif isinstance(error, StartRefused):
                    raise _SideRefusal(job.stages[0].side.name, error) from error
                else:
                    raise
    _collect_finished(run, manifest, plan)
    _note_done(run, manifest, plan)
    run.write_manifest(manifest)


def _leave_out(run: RunDirectory, manifest: Manifest, job: PlannedJob, error: MismatchProbeError) -> None:
    """Record why a job failed that the run can do without, and drop what it began."""
    for stage in job.stages:
        record = manifest.stages[stage.name]
        if record.state != "done":
            record.state, record.note = "skipped", message_of(error)
            run.parts(stage.name, stage.outputs).remove()
    run.write_manifest(manifest)


def _drop_parts_of_unknown_settings(run: RunDirectory, manifest: Manifest, plan: Plan) -> None:
    """Remove the parts of a stage whose beginning is not in the manifest, so that their settings are unknown.

    A job records parts while the command that hears it is late or was killed.
    """
    for stage in plan.stages:
        if manifest.stages[stage.name].state == "pending":
            run.parts(stage.name, stage.outputs).remove()


def conclude(run: RunDirectory, manifest: Manifest, listener: EventListener) -> Summary:
    """Summarise a run whose legs are recorded, and write the summary.

    Where a pair would be called a bug by its size, what rounding in FP32 does to the checkpoint is measured first.
    """
    summary = summarise(run, manifest)
    checks = sides_to_check(summary, manifest)
    if checks:
        manifest.rounding_checks += checks
        stages = {stage.name: StageRecord() for stage in plan_of(manifest).stages}
        manifest.stages.update({name: record for name, record in stages.items() if name not in manifest.stages})
        run.write_manifest(manifest)
        summary = summarise(run, advance(run, listener))
    run.write_summary(summary)
    return summary


def _is_stage_done(run: RunDirectory, manifest: Manifest, plan: Plan, stage: Stage) -> bool:
    if manifest.stages[stage.name].state == "skipped":
        return True
    if _complete_stage(run, manifest, stage):
        return True
    if isinstance(stage, DistributionsStage):
        return all(_is_stage_done(run, manifest, plan, reader) for reader in plan.readers(stage))
    return is_recorded(run, manifest, stage) and run.rollouts_path.exists()


def _note_done(run: RunDirectory, manifest: Manifest, plan: Plan) -> None:
    """Mark stages as done whose process was killed after the last batch and before it could report it."""
    for stage in plan.stages:
        record = manifest.stages[stage.name]
        if record.state != "skipped" and _is_stage_done(run, manifest, plan, stage):
            record.state, record.batches_done = "done", record.batches
        if record.state in ("done", "skipped"):
            _note_grown(run, manifest, stage)


def _note_grown(run: RunDirectory, manifest: Manifest, stage: Stage) -> None:
    """Record that a stage has processed the responses of added dtypes, so that its leg is complete."""
    growth = manifest.growing.pop(stage.name, None)
    if growth is not None:
        manifest.stages[stage.name] = growth.followed_by(manifest.stages[stage.name])
        run.write_manifest(manifest)


def _collect_finished(run: RunDirectory, manifest: Manifest, plan: Plan) -> None:
    """Merge the parts of finished stages into the final files, and the responses once every engine has sampled."""
    if not _collect_responses(run, manifest, plan):
        return
    legs = Legs(run, manifest.run_key)
    sampled_ids = read_table(run.rollouts_path, columns=["id"])["id"].to_pylist()
    for stage in plan.leg_stages:
        if not is_recorded(run, manifest, stage) and _complete_stage(run, manifest, stage):
            table = _merge_stage_parts(run, manifest, stage, stage.leg)
            if legs.path(stage.leg).exists():
                table = with_rows(legs.read(stage.leg), table)
            ids = set(table["id"].to_pylist())
            legs.write(stage.leg, in_order(table, [sampled_id for sampled_id in sampled_ids if sampled_id in ids]))
            _note_grown(run, manifest, stage)
        if is_recorded(run, manifest, stage):
            run.parts(stage.name, stage.outputs).remove()
    for source in plan.distributions_stages:
        if all(_is_stage_done(run, manifest, plan, reader) for reader in plan.readers(source)):
            run.parts(source.name, source.outputs).remove()


def _collect_responses(run: RunDirectory, manifest: Manifest, plan: Plan) -> bool:
    """Record the responses of engines that have none yet; returns whether those of all engines are recorded."""
    paths = (
        set(read_table(run.rollouts_path, columns=["sampler"])["sampler"].to_pylist())
        if run.rollouts_path.exists()
        else set()
    )
    absent = [stage for stage in plan.sample_stages if stage.side.sampler not in paths]
    if not all(_complete_stage(run, manifest, stage) for stage in absent):
        return False
    if absent:
        new = pa.concat_tables([_merge_stage_parts(run, manifest, stage, "rollouts") for stage in absent])
        old = read_table(run.rollouts_path) if paths else new.slice(0, 0)
        write_rollouts(run, manifest.run_key, with_rows(old, new))
    return True


def _complete_stage(run: RunDirectory, manifest: Manifest, stage: Stage) -> bool:
    batches = manifest.stages[stage.name].batches
    parts = run.parts(stage.name, stage.outputs)
    return batches > 0 and all(parts.is_done(number) for number in range(batches))


def _merge_stage_parts(run: RunDirectory, manifest: Manifest, stage: Stage, output: str) -> pa.Table:
    return run.parts(stage.name, stage.outputs).read(manifest.stages[stage.name].batches, output)
