"""A job of a comparison comes back with the error that it met, and its events survive the pipe."""

from pathlib import Path

import pytest

from mismatch_probe.compare.plan import TRAINING_PATH, BatchDone, PlannedJob, StageStarted, parse, send_event
from mismatch_probe.compare.run import run_planned_job
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.run_directory import RunDirectory
from tests.children.conftest import light_servers

__all__ = ["light_servers"]


@pytest.mark.slow
def test_the_jobs_failure_comes_back_as_the_same_error_and_its_log_is_in_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        run_planned_job(RunDirectory(tmp_path), PlannedJob(TRAINING_PATH, ()), lambda event: None)
    assert "Traceback" in RunDirectory(tmp_path).log_path(TRAINING_PATH).read_text()


def test_events_survive_the_pipe() -> None:
    for event in (
        StageStarted(stage="s", batches=3, batches_done=1),
        BatchDone(stage="s", sequences=2, tokens=30, seconds=0.5),
    ):
        messages: list[object] = []
        send_event(messages.append, event)
        assert parse(messages[0]) == event
