"""A child process, `python -m mismatch_probe.localize.worker JOB FOLDER`: one job; an error is a line of JSON.

Each side has a process of its own: vLLM binds the threads of the one it runs in, and memory is given back at its end.
"""

import json
import resource
import sys
import traceback
from pathlib import Path

from mismatch_probe.errors import EngineError, MismatchProbeError
from mismatch_probe.host import prepare
from mismatch_probe.localize.workspace import ENGINE, TRAINING, JobNotes, Workspace


def main(job: str, folder: str) -> int:
    prepare()
    workspace = Workspace(Path(folder))
    try:
        notes = _run(job, workspace)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: whatever it is reaches the parent
        known = isinstance(error, MismatchProbeError)
        kind = type(error).__name__ if known else EngineError.__name__
        what = str(error) if known else f"{job} failed unexpectedly: {type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps({"error": kind, "message": what}), flush=True)
        traceback.print_exc()
        return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    workspace.write_notes(job, notes.model_copy(update={"peak_memory_bytes": peak}))
    return 0


def _run(job: str, workspace: Workspace) -> JobNotes:
    if job == ENGINE:
        from mismatch_probe.localize.engine_job import run_engine_job

        return run_engine_job(workspace)
    if job == TRAINING:
        from mismatch_probe.localize.training_job import run_training_job

        return run_training_job(workspace)
    from mismatch_probe.localize.switches import run_switch_job

    return run_switch_job(workspace, job)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
