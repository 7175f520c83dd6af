"""A comparison's job in a process of its own, its output in `RUN/logs/JOB.log`."""

from collections.abc import Callable
from typing import Any, Final

from mismatch_probe.children import start
from mismatch_probe.compare.events import AnyEvent, parse
from mismatch_probe.compare.plan import PlannedJob
from mismatch_probe.records.run_directory import RunDirectory

_WHEN_KILLED: Final = "lower --max-new-tokens, training.batch_tokens or the engine's cache, then continue with --resume"


def run_planned_job(run: RunDirectory, job: PlannedJob, on_event: Callable[[AnyEvent], None]) -> None:
    """
    Raises:
        MismatchProbeError: the failure the job reported, or EngineError when it died without a word.
        KeyboardInterrupt: the user interrupted; the job is ended first.
    """
    child = start.Job(
        name=job.name,
        function="mismatch_probe.compare.worker:run_recorded",
        arguments=(str(run.path.absolute()), job.name),
        preload="engine" if job.starts_engine else "training",
        when_killed=_WHEN_KILLED,
        log=run.log_path(job.name),
    )

    def pass_on(message: Any) -> None:
        on_event(parse(message))

    start.run(child, pass_on)
