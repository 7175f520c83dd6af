"""What people read of a run's progress where stderr is no terminal."""

from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.cli import progress
from mismatch_probe.cli.progress import progress_listener
from mismatch_probe.compare.cost.clock import RunClock
from mismatch_probe.compare.cost.earlier import Measured
from mismatch_probe.compare.cost.stage_work import what_of, work_of
from mismatch_probe.compare.events import AnyEvent, BatchDone, RequestsDone, StageDone, StageStarted
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.stages import Stage
from mismatch_probe.records.run_directory import RunDirectory
from tests.compare.cost.workloads import settings, workload

STAGE = "sample-bf16"
At = Callable[[float, AnyEvent], str]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[At]:
    """Has an event arrive at a second; gives the line that it leaves."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    output = StringIO()
    with progress_listener(Console(file=output), RunDirectory(tmp_path)) as listener:

        def arrive(second: float, event: AnyEvent) -> str:
            clock[0] = second
            begun = len(output.getvalue())
            listener(event)
            return output.getvalue()[begun:].strip()

        yield arrive


def batch(tokens: int = 100, seconds: float = 10) -> BatchDone:
    return BatchDone(stage=STAGE, sequences=4, tokens=tokens, seconds=seconds)


def test_a_stage_says_how_fast_it_is_and_when_it_will_be_done(at: At) -> None:
    assert at(0, StageStarted(stage=STAGE, batches=4, batches_done=0)).endswith("0 of 4 batches recorded, starting")
    assert at(5, batch(seconds=5)) == ""
    assert at(20, batch(seconds=15)) == f"{STAGE}: 2 of 4 batches, 10 tokens/s, 20 s left"
    assert at(25, StageDone(stage=STAGE)) == f"{STAGE}: done, 10 tokens/s"


def test_what_was_recorded_before_a_resume_took_no_time_of_this_one(at: At) -> None:
    at(0, StageStarted(stage=STAGE, batches=100, batches_done=90))
    assert at(10, batch()).endswith("91 of 100 batches, 10 tokens/s, 90 s left")


def test_a_batch_in_flight_says_how_far_it_is(at: At) -> None:
    at(0, StageStarted(stage=STAGE, batches=1, batches_done=0))
    assert at(5, RequestsDone(stage=STAGE, done=8, of=64)) == ""
    line = at(20, RequestsDone(stage=STAGE, done=16, of=64))
    assert line == f"{STAGE}: 16 of 64 requests of batch 1 of 1"


def two_stages() -> tuple[Stage, Stage, RunClock]:
    """Stages that took 100 s each in an earlier run, and the clock of a run that has both to do."""
    first, second = make_plan(settings(full_vocabulary={"positions": 0})).stages[:2]
    known = workload()
    earlier = [Measured(what_of(stage), work_of(stage, known), 100, 0) for stage in (first, second)]
    return first, second, RunClock([first, second], known, earlier)


def shown(output: StringIO, tmp_path: Path, *, is_terminal: bool) -> str:
    """What people see of the first of `two_stages`."""
    first, _, clock = two_stages()
    console = Console(file=output, force_terminal=is_terminal, width=120)
    with progress_listener(console, RunDirectory(tmp_path), clock) as listener:
        listener(StageStarted(stage=first.name, batches=1, batches_done=0))
        listener(BatchDone(stage=first.name, sequences=8, tokens=400, seconds=100))
        listener(StageDone(stage=first.name))
    return output.getvalue()


def test_a_line_says_how_much_of_all_stages_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    *_, started, done = shown(StringIO(), tmp_path, is_terminal=False).splitlines()
    assert started == f"{STAGE}: 0 of 1 batches recorded, starting; about 3 min (1.1 to 10) left in all"
    assert done == f"{STAGE}: done, 4 tokens/s; about 1.7 min (0.6 to 5) left in all"


def test_a_terminal_shows_it_in_a_row_of_its_own(tmp_path: Path) -> None:
    last = shown(StringIO(), tmp_path, is_terminal=True).split("whole run")[-1]
    assert "about 1.7 min (0.6 to 5) left in all" in last
