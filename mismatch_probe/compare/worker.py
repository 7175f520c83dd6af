"""A child process, `python -m mismatch_probe.compare.worker`: runs one job of the plan and reports on a pipe."""

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO

from mismatch_probe.compare.events import Failure, send
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.errors import EngineError, MismatchProbeError
from mismatch_probe.host import prepare
from mismatch_probe.records.run_directory import RunDirectory


def main(run_path: str, job_name: str, events_descriptor: str) -> int:
    """Run a job; 0 when every stage is done. A failure is sent as an event before the process ends with 1.

    The event comes before the traceback, which a full disk keeps out of the log.
    """
    _die_with_parent()
    prepare()
    with os.fdopen(int(events_descriptor), "w", encoding="utf-8") as events:
        try:
            _run(RunDirectory(Path(run_path)), job_name, events)
        except MismatchProbeError as error:
            send(events, Failure(error=type(error).__name__, message=str(error)))
            traceback.print_exc()
            return 1
        except Exception as error:  # noqa: BLE001 - the boundary of the process: whatever it is reaches the parent
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            send(events, Failure(error=EngineError.__name__, message=f"{job_name} failed unexpectedly: {what}"))
            traceback.print_exc()
            return 1
    return 0


def _run(run: RunDirectory, job_name: str, events: IO[str]) -> None:
    manifest = run.read_manifest()
    job = make_plan(manifest.settings).job(job_name)
    if job_name == "training-path":
        from mismatch_probe.compare.scoring_job import run_scoring

        run_scoring(run, manifest, job, events)
    else:
        from mismatch_probe.compare.engine_job import run_engine

        run_engine(run, manifest, job, events)


def _die_with_parent() -> None:
    """The parent holds the other end of standard input; when it closes, this process group ends at once."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
