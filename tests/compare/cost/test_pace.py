"""Intervals: around what was measured, wider the less it is like what is to come."""

import pytest

from mismatch_probe.compare.cost.earlier import FROM_ANOTHER_SIDE, FROM_RATES, FROM_THE_SAME, Measurement, Pace
from mismatch_probe.compare.cost.roofline import Work
from mismatch_probe.compare.cost.stage_work import StageKey
from mismatch_probe.compare.stages import ReplayStage, SampleStage, ScoreStage, Stage
from mismatch_probe.dtypes import Dtype
from tests.compare.cost.workloads import calibration

SECOND = Work(matrix_flops=1e9)
"""With the rates of `calibration`."""


def key(kind: type[Stage] = ScoreStage, dtype: Dtype = Dtype.BF16, manner: str = "plain") -> StageKey:
    return StageKey(kind, "training" if kind is ScoreStage else "engine", dtype, manner)


def measured(
    kind: type[Stage] = ScoreStage, dtype: Dtype = Dtype.BF16, *, work: Work = SECOND, seconds: float = 3.0
) -> Measurement:
    return Measurement(key(kind, dtype), work, seconds, start_seconds=5.0)


def test_rates_alone_give_the_arithmetic_and_a_wide_interval() -> None:
    span = Pace(calibration(), []).span(key(), SECOND.times(10))
    assert span is not None
    assert span.likely_seconds == pytest.approx(10)
    assert (span.low_seconds, span.high_seconds) == pytest.approx((10 / FROM_RATES, 10 * FROM_RATES))


def test_the_same_work_takes_as_long_again() -> None:
    for known in (calibration(), None):
        span = Pace(known, [measured()]).span(key(), SECOND)
        assert span is not None
        assert span.likely_seconds == pytest.approx(3)
        assert (span.low_seconds, span.high_seconds) == pytest.approx((3 / FROM_THE_SAME, 3 * FROM_THE_SAME))


def test_what_a_small_stage_took_beyond_its_arithmetic_may_grow_or_not() -> None:
    span = Pace(calibration(), [measured()]).span(key(), SECOND.times(10))
    assert span is not None
    assert span.low_seconds == pytest.approx((10 + 2) / FROM_THE_SAME)
    assert span.high_seconds == pytest.approx(10 * 3 * FROM_THE_SAME)


def test_of_several_the_one_nearest_in_size_tells() -> None:
    known = [measured(seconds=3), measured(work=SECOND.times(9), seconds=9)]
    span = Pace(calibration(), known).span(key(), SECOND.times(10))
    assert span is not None
    assert span.likely_seconds == pytest.approx(10)


def test_another_dtype_tells_less_and_another_kind_nothing_but_for_what_is_computed_alike() -> None:
    pace = Pace(None, [measured(dtype=Dtype.FP32)])
    span = pace.span(key(), SECOND)
    assert span is not None
    assert span.high_seconds == pytest.approx(3 * FROM_ANOTHER_SIDE)
    assert pace.span(key(ReplayStage), SECOND) is not None
    assert pace.span(key(SampleStage), SECOND) is None
    assert Pace(None, []).span(key(), SECOND) is None


def test_a_start_is_known_from_starts_alone() -> None:
    pace = Pace(calibration(), [measured()])
    start = pace.start_span(key(dtype=Dtype.FP32))
    assert start is not None
    assert start.likely_seconds == 5
    assert pace.start_span(key(SampleStage)) is None
    assert pace.start_span(key(manner="compiled")) is None, "an eager start tells nothing of a compiling one"


def test_an_engine_here_and_a_server_tell_nothing_of_each_other() -> None:
    of_server = StageKey(SampleStage, "server", Dtype.BF16, "prod")
    assert Pace(None, [measured(SampleStage)]).span(of_server, SECOND) is None
    known = Pace(None, [Measurement(of_server, SECOND, 3.0, start_seconds=1.0)])
    assert known.span(key(SampleStage), SECOND) is None
    assert known.span(of_server, SECOND) is not None


def test_a_dtype_whose_rates_were_not_measured_tells_nothing_beside_rates() -> None:
    """An earlier run of another dtype: the machine is measured for those of this one alone."""
    known = calibration()
    bf16 = known.model_copy(update={"rates": [rate for rate in known.rates if rate.dtype == Dtype.BF16]})
    span = Pace(bf16, [measured(dtype=Dtype.FP16)]).span(key(), SECOND)
    assert span is not None
    assert span.likely_seconds == pytest.approx(1)
