"""What a child process of a comparison does: one job of the plan."""

from pathlib import Path

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.plan import TRAINING_PATH, make_plan
from mismatch_probe.records.run_directory import RunDirectory


def run_recorded(events: Send, run_path: str, job_name: str) -> None:
    """Run a job of the run in `run_path` until every stage of it is recorded.

    Raises:
        MismatchProbeError: it cannot be done.
    """
    run = RunDirectory(Path(run_path))
    manifest = run.read_manifest()
    job = make_plan(manifest.settings).job(job_name)
    if job_name == TRAINING_PATH:
        from mismatch_probe.compare.scoring_job import run_scoring

        run_scoring(run, manifest, job, events)
    else:
        from mismatch_probe.compare.engine_job import run_engine

        run_engine(run, manifest, job, events)
