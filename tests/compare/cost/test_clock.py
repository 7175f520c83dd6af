"""The time left of a run, told from its own events."""

import pytest

from mismatch_probe.compare.cost import forecast as module
from mismatch_probe.compare.cost.earlier import Measurement
from mismatch_probe.compare.cost.forecast import RunClock, Starting
from mismatch_probe.compare.cost.roofline import NO_TIME, Calibration
from mismatch_probe.compare.cost.stage_work import key_of, work_of
from mismatch_probe.compare.plan import BatchDone, JobStarted, StageDone, StageStarted, make_plan
from mismatch_probe.compare.stages import Stage
from mismatch_probe.dtypes import Dtype
from tests.compare.cost.workloads import calibration, settings, workload

NO_FEW = {"floors": {"num_sequences": 0}, "experts": {"num_sequences": 0}, "full_vocabulary": {"positions": 0}}
SETTINGS = settings(pairs=[["bf16", "bf16"]], **NO_FEW)
STAGES = make_plan(SETTINGS).stages
WORKLOAD = workload(pairs=[["bf16", "bf16"]], checkpoint_dtype=Dtype.BF16)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


def took(stage: Stage, seconds: float, start_seconds: float = 0.0) -> Measurement:
    work = work_of(stage, WORKLOAD)
    return Measurement(key_of(stage), work, seconds, start_seconds)


def test_stages_as_long_as_in_an_earlier_run_are_left_before_any_begins(now: list[float]) -> None:
    clock = RunClock(STAGES, WORKLOAD, [took(stage, 10, 2) for stage in STAGES if work_of(stage, WORKLOAD).operations])
    left = clock.remaining()
    assert left is not None
    assert left.likely_seconds == pytest.approx(4 * 12)
    assert left.low_seconds < 48 < left.high_seconds


def test_a_first_run_tells_its_rest_once_it_has_scored_something(now: list[float]) -> None:
    clock = RunClock(STAGES, WORKLOAD, [])
    sample, replay, *_ = STAGES
    clock(StageStarted(stage=sample.name, batches=1, batches_done=0))
    assert clock.remaining() is None
    clock(BatchDone(stage=sample.name, sequences=8, tokens=400, seconds=10))
    clock(StageDone(stage=sample.name))
    clock(StageStarted(stage=replay.name, batches=2, batches_done=0))
    assert clock.remaining() is None, "nothing like scoring was measured yet"
    clock(BatchDone(stage=replay.name, sequences=4, tokens=200, seconds=3))
    clock(BatchDone(stage=replay.name, sequences=4, tokens=200, seconds=3))
    clock(StageDone(stage=replay.name))
    left = clock.remaining()
    assert left is not None
    assert left.low_seconds < 12 < left.high_seconds


def test_sampling_tells_of_what_is_decoded_alone_and_scoring_of_experts(now: list[float]) -> None:
    stages = make_plan(settings(pairs=[["bf16", "bf16"]])).stages
    sample = next(stage for stage in stages if stage.name == "sample-bf16")
    score = next(stage for stage in stages if stage.name == "score-train-bf16")
    assert RunClock(stages, WORKLOAD, [took(sample, 10)]).remaining() is None, "nothing like scoring was measured"
    assert RunClock(stages, WORKLOAD, [took(score, 10)]).remaining() is None, "nothing like sampling was measured"
    assert RunClock(stages, WORKLOAD, [took(sample, 10), took(score, 10)]).remaining() is not None


def test_a_stage_that_runs_tells_its_rest_by_its_own_batches(now: list[float]) -> None:
    *_, last = STAGES
    clock = RunClock([last], WORKLOAD, [took(last, 1000)])
    clock(StageStarted(stage=last.name, batches=10, batches_done=4))
    clock(BatchDone(stage=last.name, sequences=1, tokens=50, seconds=5))
    left = clock.remaining()
    assert left is not None
    assert left.likely_seconds == pytest.approx(5 * 5)


def test_what_passed_of_a_single_batch_is_no_longer_left(now: list[float]) -> None:
    first, *_ = STAGES
    clock = RunClock([first], WORKLOAD, [took(first, 10)])
    clock(StageStarted(stage=first.name, batches=1, batches_done=0))
    now[0] = 4.0
    left = clock.remaining()
    assert left is not None
    assert left.likely_seconds == pytest.approx(6)


def test_a_first_run_on_a_machine_whose_rates_were_measured_tells_its_time_at_once(now: list[float]) -> None:
    starting = Starting(ready_seconds=8.0, on_cpu=True)
    clock = RunClock(STAGES, WORKLOAD, [], calibration(), starting)
    left = clock.remaining()
    assert left is not None
    without_starts = RunClock(STAGES, WORKLOAD, [], calibration()).remaining()
    assert without_starts is not None
    assert left.likely_seconds > without_starts.likely_seconds + 4


def test_what_passed_of_a_start_is_no_longer_left(now: list[float]) -> None:
    first, *_ = STAGES
    clock = RunClock([first], WORKLOAD, [took(first, 10, start_seconds=5)])
    now[0] = 3.0
    left = clock.remaining()
    assert left is not None
    assert left.likely_seconds == pytest.approx(12)
    now[0] = 30.0
    left = clock.remaining()
    assert left is not None
    assert left.likely_seconds == pytest.approx(10), "its batches are still to come"


def test_what_passed_of_the_batch_in_flight_is_no_longer_left(now: list[float]) -> None:
    *_, last = STAGES
    clock = RunClock([last], WORKLOAD, [])
    clock(StageStarted(stage=last.name, batches=3, batches_done=0))
    now[0] = 5.0
    clock(BatchDone(stage=last.name, sequences=1, tokens=50, seconds=5))
    now[0] = 7.0
    left = clock.remaining()
    assert left is not None
    assert left.likely_seconds == pytest.approx(8)


def test_a_stage_that_is_none_of_the_plan_is_let_pass(now: list[float]) -> None:
    clock = RunClock(STAGES, WORKLOAD, [])
    clock(StageStarted(stage="sample-training-path", batches=1, batches_done=0))
    clock(BatchDone(stage="sample-training-path", sequences=1, tokens=1, seconds=1))
    assert clock.remaining() is None


@pytest.mark.parametrize("rates", [None, calibration()])
def test_a_check_that_a_run_gets_later_is_timed_by_the_stages_of_the_run(
    now: list[float], rates: Calibration | None
) -> None:
    """No rate of FP64 was measured beforehand: the reference in FP32, which took 10 s, tells."""
    plan = make_plan(SETTINGS, ["bf16"])
    check = JobStarted(process="training", stages=[plan.stages[-1].name])
    starting = None if rates is None else Starting(5, on_cpu=True)
    clock, deaf_clock = (
        RunClock([], WORKLOAD, [took(stage, 10) for stage in STAGES], rates, starting, stages_of_run)
        for stages_of_run in (lambda: plan.stages, tuple)
    )
    for each in (clock, deaf_clock):
        each(check)
    left, left_of_deaf_clock = clock.remaining(), deaf_clock.remaining()
    assert left is not None
    assert left_of_deaf_clock == NO_TIME
    assert left.low_seconds < 20 < left.high_seconds
