"""A schedule of the learning rate fires nothing, however it is shaped; a rate beyond what the run had does."""

import math
from collections.abc import Callable

import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rules import DEFAULT_GUARDS, parse_guards

HIGHEST = 1e-4
CYCLE = 25
STEPS = 120

Schedule = Callable[[int], float]


def cosine_with_restarts(step: int) -> float:
    return HIGHEST * (1 + math.cos(math.pi * ((step - 1) % CYCLE) / CYCLE)) / 2


def after_a_warm_up(step: int) -> float:
    return HIGHEST * step / 10 if step <= 10 else cosine_with_restarts(step - 10)


def with_lower_peaks(step: int) -> float:
    return cosine_with_restarts(step) * 0.8 ** ((step - 1) // CYCLE)


def sawtooth(step: int) -> float:
    return HIGHEST * (1 - ((step - 1) % CYCLE) / CYCLE * 0.999)


def fired(rate: Schedule, *, shift: bool = True) -> list[tuple[int, str]]:
    """By the guards on the rate and on updates, which go with its square."""
    names = ("learning-rate-jump", "update-size", "update-jump")
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name in names))
    events = []
    for step in range(1, STEPS + 1):
        moved = 0.02 * (rate(max(1, step - 1)) / HIGHEST) ** 2 if shift else 1e-6
        metrics = {"optim/learning_rate": rate(step), "update/policy_shift_k3": moved if step > 1 else 0.0}
        metrics["update/policy_shift_farthest"] = 0.0
        events += [(step, event.guard) for event in book.evaluate(step, metrics).events]
    return events


@pytest.mark.parametrize("schedule", [cosine_with_restarts, after_a_warm_up, with_lower_peaks, sawtooth])
def test_a_schedule_that_begins_anew_fires_nothing(schedule: Schedule) -> None:
    assert fired(schedule) == []


@pytest.mark.parametrize("schedule", [cosine_with_restarts, after_a_warm_up, sawtooth])
@pytest.mark.parametrize("factor", [10.0, 100.0])
def test_a_rate_that_leaves_its_schedule_upwards_is_seen_at_once(schedule: Schedule, factor: float) -> None:
    onset = 40
    events = fired(lambda step: schedule(step) * (factor if step >= onset else 1.0), shift=False)
    first, guard = events[0]
    assert guard == "learning-rate-jump"
    assert first >= onset
    assert all(factor * schedule(step) <= 4 * HIGHEST for step in range(onset, first))


def test_a_restart_is_not_named_as_the_cause_of_what_fires_after_it() -> None:
    guards = Guards(
        tuple(guard for guard in DEFAULT_GUARDS if guard.name in ("learning-rate-jump", "reward-nonfinite"))
    )
    for step in range(1, CYCLE + 3):
        metrics = {"optim/learning_rate": cosine_with_restarts(step), "reward/nonfinite": 0.0}
        assert not guards.judge(step, metrics, canary=False).events
    lost = guards.judge(CYCLE + 3, {"optim/learning_rate": HIGHEST, "reward/nonfinite": 2.0}, canary=False)
    assert lost.diagnosis is not None
    assert lost.diagnosis.cause is EndCause.REWARD_NAN
    assert guards.diagnosis().cause is not EndCause.LEARNING_RATE


def test_the_highest_level_is_remembered_across_a_restart_of_the_process() -> None:
    def book() -> GuardBook:
        return GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "learning-rate-jump"))

    before, after = book(), book()
    for step in range(1, CYCLE + 1):
        before.evaluate(step, {"optim/learning_rate": cosine_with_restarts(step)})
    after.restore(before.state())
    assert after.evaluate(CYCLE + 1, {"optim/learning_rate": HIGHEST}).events == ()
    without = book()
    for step in range(1, 5):
        without.evaluate(step, {"optim/learning_rate": cosine_with_restarts(CYCLE)})
    assert without.evaluate(5, {"optim/learning_rate": HIGHEST}).events


def test_without_of_highest_a_growth_is_one_however_high_the_metric_was() -> None:
    own = {"name": "g", "rule": "growth", "metric": "loop/lag", "ratio": 2, "reference": 2, "actions": ["log"]}
    seen = []
    for table in (own, {**own, "of_highest": 1}):
        book = GuardBook(parse_guards({"defaults": False, "guard": [table]}, "own.toml"))
        events = [book.evaluate(step, {"loop/lag": lag}).events for step, lag in enumerate([9, 3, 1, 1, 9], start=1)]
        seen.append([bool(each) for each in events])
    assert seen == [[False] * 4 + [True], [False] * 5]


def doubling(step: int) -> float:
    return HIGHEST * min(1.0, 2.0 ** (step - 10))


def from_a_thousandth(step: int) -> float:
    return HIGHEST * min(1.0, 0.001 + 0.05 * (step - 1))


@pytest.mark.parametrize("schedule", [doubling, from_a_thousandth])
def test_a_warm_up_fires_nothing_however_steep_it_is(schedule: Schedule) -> None:
    assert fired(schedule) == []
    events = fired(lambda step: schedule(step) * (10 if step >= 40 else 1), shift=False)
    assert events[0] == (40, "learning-rate-jump")


def decided(rate: Schedule, moved: Callable[[float], float] | None, steps: int) -> list[Decision]:
    """By the guard on the rate; `moved`: what an update at a rate moves the policy by, which the next step shows."""
    guards = Guards(tuple(each for each in DEFAULT_GUARDS if each.name == "learning-rate-jump"), can={"skip", "stop"})
    decisions: list[Decision] = []
    for step in range(1, steps + 1):
        metrics = {"optim/learning_rate": rate(step)}
        if moved is not None:
            is_applied = step > 1 and not decisions[-1].skip
            metrics["update/policy_shift_k3"] = moved(rate(step - 1)) if is_applied else 0.0
        decisions.append(guards.judge(step, metrics, canary=False))
    return decisions


def low_at_first(step: int) -> float:
    return 1e-8 if step < 20 else 1e-5


def test_a_rate_that_jumps_to_where_updates_are_ordinary_is_warned_of_once() -> None:
    decisions = decided(low_at_first, lambda rate: 1e-3 * (rate / 1e-5) ** 2, 60)
    (seen,) = [decision for decision in decisions if decision.events]
    assert seen.step == 20
    assert [action.kind for event in seen.events for action in event.actions] == ["warn"]
    assert "one at this rate moves the policy by about 0.001" in seen.events[0].sentence


def test_a_rate_whose_updates_cannot_be_foreseen_stops_nothing_while_they_are_ordinary() -> None:
    decisions = decided(low_at_first, lambda rate: 1e-3 * (rate / 1e-5) ** 2 + 1e-7, 60)
    assert [decision.step for decision in decisions if decision.skip] == [20, 21]
    assert not any(decision.stop for decision in decisions)
    assert [decision.step for decision in decisions if decision.events] == [20, 21, 22]


@pytest.mark.parametrize("moved", [None, lambda rate: 0.01 * (rate / 1e-8) ** 2])
def test_a_rate_that_jumps_to_where_updates_are_large_or_unknown_ends_the_run(
    moved: Callable[[float], float] | None,
) -> None:
    decisions = decided(low_at_first, moved, 24)
    assert [decision.step for decision in decisions if decision.skip][:3] == [20, 21, 22]
    assert next(decision.step for decision in decisions if decision.stop) == 22
    assert str(decisions[-1].diagnosis).startswith("The learning rate is too high: it rose")
