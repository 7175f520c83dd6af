"""A job of a localization in a process of its own: how it is started, its output in the workspace, and what it does.

Each side has a process of its own: vLLM binds the threads of the one it runs in, and memory is given back at its end.
"""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children import start
from mismatch_probe.children.messages import Send
from mismatch_probe.localize.workspace import ENGINE, TRAINING, JobNotes, Workspace

_WHEN_KILLED: Final = "lower --num-prompts or --max-new-tokens"


def run_job(workspace: Workspace, job: str, tell: Callable[[str], None]) -> JobNotes:
    """Run a job to its end; `tell` hears how far it is.

    Raises:
        MismatchProbeError: what the job raised, or EngineError when it died without a word.
    """
    child = start.Job(
        name=f"the {job} job",
        function=f"{__name__}:run_noted",
        arguments=(job, str(workspace.path.absolute())),
        preload="training" if job == TRAINING else "engine",
        when_killed=_WHEN_KILLED,
        log=workspace.log(job),
    )
    return JobNotes.model_validate(start.run(child, tell))


def run_noted(send: Send, job: str, folder: str) -> dict[str, Any]:
    """The job's notes as JSON values: what the child process does.

    Raises:
        MismatchProbeError: it cannot be done.
    """
    notes = _run(job, Workspace(Path(folder)), send)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return notes.model_copy(update={"peak_memory_bytes": peak}).model_dump(mode="json")


def _run(job: str, workspace: Workspace, tell: Callable[[str], None]) -> JobNotes:
    if job == ENGINE:
        from mismatch_probe.localize.engine_job import run_engine_job

        return run_engine_job(workspace, tell)
    if job == TRAINING:
        from mismatch_probe.localize.training_job import run_training_job

        return run_training_job(workspace, tell)
    from mismatch_probe.localize.switches import run_switch_job

    return run_switch_job(workspace, job)
