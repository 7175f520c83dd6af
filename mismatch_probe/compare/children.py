"""A comparison's job in a process of its own: how it is started, its output in `RUN/logs/JOB.log`, and what it does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children import start
from mismatch_probe.children.messages import Send
from mismatch_probe.children.ranks import Place
from mismatch_probe.compare.events import AnyEvent, parse
from mismatch_probe.compare.over_ranks import FOLLOW_ENGINE, FOLLOW_SCORER, run_over_ranks
from mismatch_probe.compare.plan import PlannedJob, make_plan
from mismatch_probe.records.run_directory import RunDirectory

_WHEN_KILLED: Final = {
    True: "lower --max-new-tokens or the engine's cache, then continue with --resume",
    False: "lower --max-new-tokens or training.batch_tokens, or hold one layer of the reference at a time "
    "(--reference-by-layer), then continue with --resume",
}
"""By whether the job holds an engine."""


def run_planned_job(run: RunDirectory, job: PlannedJob, on_event: Callable[[AnyEvent], None]) -> None:
    """
    Raises:
        MismatchProbeError: the failure the job reported, or EngineError when it died without a word.
        KeyboardInterrupt: the user interrupted; the job is ended first.
    """
    child = start.Job(
        name=job.name,
        function=f"{__name__}:run_recorded",
        arguments=(str(run.path.absolute()), job.name),
        preload="engine" if job.starts_engine else "training",
        when_killed=_WHEN_KILLED[job.starts_engine],
        log=run.log_path(job.name),
    )
    if job.num_ranks:
        follow = FOLLOW_ENGINE if job.starts_engine else FOLLOW_SCORER
        run_over_ranks(child, follow, job.num_ranks, lambda message: on_event(parse(message)))
    else:
        start.run(child, lambda message: on_event(parse(message)))


def run_recorded(events: Send, run_path: str, job_name: str, place: dict[str, Any] | None = None) -> None:
    """Run a job of the run in `run_path` until every stage of it is recorded: what the child process does.

    Raises:
        MismatchProbeError: it cannot be done.
    """
    run = RunDirectory(Path(run_path))
    manifest = run.read_manifest()
    job = make_plan(manifest.settings).job(job_name)
    if job.process == "training":
        from mismatch_probe.compare.scoring_job import run_scoring, run_scoring_over_ranks

        if place is None:
            run_scoring(run, manifest, job, events)
        else:
            run_scoring_over_ranks(run, manifest, job, events, Place.from_json(place))
    else:
        from mismatch_probe.compare.engine_job import run_engine

        if place is None:
            run_engine(run, manifest, job, events)
            return
        from mismatch_probe.compare.engine_ranks import run_engine_over_ranks

        run_engine_over_ranks(run, manifest, job, events, Place.from_json(place))
