"""What an examination for FP16 takes: a forecast, and a clock that knows all of it from the first pass on."""

from collections.abc import Iterator

import pytest

from mismatch_probe.compare.cost import headroom as module
from mismatch_probe.compare.cost.headroom import (
    LOOK_BACKWARD,
    LOOK_FORWARD,
    HeadroomClock,
    HeadroomForecast,
    Passes,
    PassStarted,
    forecast_headroom,
    passes_backward,
)
from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.config.load import parse_settings
from tests.compare.cost.workloads import ARCHITECTURE, calibration

BATCHES = 4
LOOK_SECONDS, FORWARD_SECONDS, SAMPLE_SECONDS = 5.0, 1.0, 20.0
PLAN: tuple[tuple[str, tuple[Passes, ...]], ...] = (
    ("fp32_forward", (LOOK_FORWARD,)),
    ("bf16", (LOOK_FORWARD, passes_backward(1))),
    ("fp16", (LOOK_FORWARD, passes_backward(7), passes_backward(6))),
    ("fp32_backward", (LOOK_BACKWARD,)),
)


def settings(**changes: object) -> HeadroomSettings:
    return parse_settings(HeadroomSettings, {"model": {"path": "none"}, **changes})


def ahead(response_tokens: float = 50, memory_bytes: int = 2**34, speed: float = 1.0) -> HeadroomForecast:
    known = calibration(speed, memory_bytes)
    return forecast_headroom(settings(), ARCHITECTURE, [20] * 64, response_tokens, known)


class Examination:
    """One that takes `LOOK_SECONDS` and `FORWARD_SECONDS` a batch, and what a clock says of it at every batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forecast: HeadroomForecast | None) -> None:
        self._now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self._now)
        self._clock = HeadroomClock(forecast)

    def course(self) -> Iterator[tuple[float, float | None]]:
        """The second, and what is left by the clock."""
        for stage, seconds in (("weights", 1.0), ("responses", SAMPLE_SECONDS)):
            self._clock.begin(stage)
            yield self._now, self._clock.remaining()
            self._now += seconds
        for stage, steps in PLAN:
            self._clock.begin(stage)
            for passes in steps:
                for number in range(1, BATCHES + 1):
                    self._clock.batch(PassStarted("", number, BATCHES, passes))
                    yield self._now, self._clock.remaining()
                    self._now += passes.looks * LOOK_SECONDS + passes.forwards * FORWARD_SECONDS
        self.seconds = self._now


def test_once_a_look_and_a_plain_pass_were_timed_the_time_left_is_that_of_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examination = Examination(monkeypatch, None)
    course = list(examination.course())
    assert course[0][1] is None, "nothing was timed, and nothing is forecast"
    known = [(second, left) for second, left in course if second > SAMPLE_SECONDS + 1 + 8 * LOOK_SECONDS + 7]
    assert len(known) > 15
    for second, left in known:
        assert left == pytest.approx(examination.seconds - second, abs=1e-6)


def test_before_anything_was_timed_the_forecast_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = ahead().model_copy(
        update={"sample_seconds": SAMPLE_SECONDS, "forward_seconds": FORWARD_SECONDS, "num_batches": BATCHES}
    )
    examination = Examination(monkeypatch, forecast)
    lefts = [left for _, left in examination.course()]
    assert all(left is not None for left in lefts)
    assert lefts[0] == pytest.approx(examination.seconds, rel=0.2)


def test_a_further_try_with_modules_in_fp32_is_as_long_as_the_run_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    examination = Examination(monkeypatch, None)
    list(examination.course())
    clock = examination._clock
    clock.begin("advised")
    for _ in range(2):
        clock.batch(PassStarted("try", 1, BATCHES, LOOK_FORWARD))
        of_try = BATCHES * (LOOK_SECONDS + FORWARD_SECONDS * sum(passes_backward(num).forwards for num in (7, 6)))
        assert clock.remaining() == pytest.approx(of_try)
        examination._now += LOOK_SECONDS


def test_a_forecast_grows_with_its_work_and_shrinks_on_a_faster_machine() -> None:
    usual = ahead()
    assert ahead(100).time.likely_seconds > usual.time.likely_seconds
    assert ahead(speed=2.0).time.likely_seconds == pytest.approx(usual.time.likely_seconds / 2)
    assert ahead(1e6).time == ahead(settings().sampling.max_new_tokens).time, "responses end at --max-new-tokens"
    assert usual.time.low_seconds < usual.time.likely_seconds < usual.time.high_seconds


def test_memory_holds_every_weight_four_times_and_says_where_it_is_too_much() -> None:
    assert ahead().memory.peak_bytes > 16 * ARCHITECTURE.parameters
    assert ahead().memory.fits
    assert not ahead(memory_bytes=2**20).memory.fits
    assert "--weights-only" in ahead(memory_bytes=2**20).memory.advice
