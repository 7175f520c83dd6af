"""A job of a localization in a process of its own, its output in the workspace."""

from typing import Final

from mismatch_probe.children import start
from mismatch_probe.localize.workspace import TRAINING, JobNotes, Workspace

_WHEN_KILLED: Final = "lower --num-prompts or --max-new-tokens"


def run_job(workspace: Workspace, job: str) -> JobNotes:
    """Run a job to its end.

    Raises:
        MismatchProbeError: what the job raised, or EngineError when it died without a word.
    """
    child = start.Job(
        name=f"the {job} job",
        function="mismatch_probe.localize.worker:run_noted",
        arguments=(job, str(workspace.path.absolute())),
        preload="training" if job == TRAINING else "engine",
        when_killed=_WHEN_KILLED,
        log=workspace.log(job),
    )
    return JobNotes.model_validate(start.run(child))
