"""Hysteresis, escalation, canaries, missing metrics, and a book that is resumed."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.diagnosis import GuardEvent, StepFirings
from mismatch_probe.guards.rules import DEFAULT_GUARDS, parse_guards
from tests.guards.streams import LEVELS_K3, Run, overflow_each_step, sync_skipped


def book(*tables: dict[str, Any]) -> GuardBook:
    return GuardBook(parse_guards({"defaults": False, "guard": [*tables]}, "guards.toml"))


def limit(**changes: Any) -> dict[str, Any]:
    return {"name": "g", "rule": "limit", "metric": "m", "above": 1, "actions": ["log", "warn", "stop"], **changes}


def answers(guards: GuardBook, values: list[float]) -> list[str]:
    return [
        " ".join(map(str, guards.evaluate(step, {"m": value}).actions)) for step, value in enumerate(values, start=1)
    ]


def test_it_fires_after_patience_broken_steps_in_a_row() -> None:
    assert answers(book(limit(patience=3)), [2, 2, 0, 2, 2, 2]) == ["", "", "", "", "", "log"]


def test_a_breach_that_lasts_escalates_and_the_last_action_repeats() -> None:
    assert answers(book(limit(patience=2)), [2] * 8) == ["", "log", "", "warn", "", "stop", "", "stop"]


def test_it_starts_over_only_after_enough_clean_steps_in_a_row() -> None:
    assert answers(book(limit(clear_after=3)), [2, 0, 0, 2, 0, 0, 0, 2]) == ["log", "", "", "warn", "", "", "", "log"]


def test_it_learns_and_stays_silent_while_warming_up() -> None:
    growth = limit(rule="growth", ratio=5, warmup=2)
    del growth["above"]
    assert answers(book(growth), [1, 9, 9]) == ["", "", "log"]


def test_a_firing_may_ask_for_several_actions() -> None:
    assert answers(book(limit(actions=[["warn", "resync", "skip_update"]])), [2]) == ["resync skip_update warn"]


def test_what_several_guards_ask_for_is_said_once_strongest_first() -> None:
    guards = book(
        limit(name="a", actions=["warn"]),
        limit(name="b", actions=[["lower_learning_rate(0.5)", "warn", "switch_correction(seq-tis)"]]),
        limit(name="c", actions=[["lower_learning_rate(0.1)", "switch_correction(seq-mis)"]]),
        limit(name="d", actions=[["raise_precision(train)", "raise_precision(infer)"]]),
    )
    assert answers(guards, [2]) == [
        "raise_precision(train) raise_precision(infer) switch_correction(seq-tis) lower_learning_rate(0.1) warn"
    ]


def test_an_event_records_which_guard_fired_on_what_and_why() -> None:
    event = book(limit()).evaluate(7, {"m": 2.5}).events[0].as_json()
    assert event == {
        "step": 7,
        "guard": "g",
        "rule": "limit",
        "metric": "m",
        "value": 2.5,
        "threshold": 1.0,
        "firing": 1,
        "actions": ["log"],
        "sentence": "m is 2.50, above its limit of 1",
    }


def test_an_event_on_a_value_that_is_no_number_is_strict_json() -> None:
    event = book(limit()).evaluate(1, {"m": math.nan}).events[0]
    assert json.loads(json.dumps(event.as_json(), allow_nan=False))["value"] == "nan"


@pytest.mark.parametrize("value", [2.5, math.inf])
def test_an_event_is_read_back_as_it_was(value: float) -> None:
    guards = book(limit(actions=["warn", ["skip_update", "lower_learning_rate(0.3)", "raise_precision(infer)"]]))
    for event in (*guards.evaluate(1, {"m": value}).events, *guards.evaluate(2, {"m": value}).events):
        assert GuardEvent.from_json(json.loads(json.dumps(event.as_json(), allow_nan=False))) == event


def test_a_guard_that_could_never_fire_is_refused_before_and_at_the_first_step() -> None:
    guards = book(limit(metric="mismatch/kl_k4"))
    for check in (
        lambda: guards.check_metrics({"mismatch/kl_k3"}),
        lambda: guards.evaluate(1, {"mismatch/kl_k3": 1.0}),
    ):
        with pytest.raises(
            UsageError, match=r"guard 'g' reads 'mismatch/kl_k4', which no step gives.*mean 'mismatch/kl_k3'"
        ):
            check()


def test_a_metric_missing_later_is_named_and_counts_neither_as_broken_nor_as_clean() -> None:
    guards = book(limit(patience=2, clear_after=1))
    assert guards.evaluate(1, {"m": 2.0}) == StepFirings(1)
    assert guards.evaluate(2, {}) == StepFirings(2, missing=("m",))
    assert [str(action) for action in guards.evaluate(3, {"m": 2.0}).actions] == ["log"]


def test_a_canary_is_judged_at_once_and_escalates() -> None:
    guards = book(limit(patience=5))
    assert not guards.observe_canary({"m": 0.5}).events
    first, second = guards.observe_canary({"m": 2.0}), guards.observe_canary({"m": 2.0}, step=4)
    assert [(str(found.actions[0]), found.step) for found in (first, second)] == [("log", 0), ("warn", 4)]


def test_a_canary_within_the_warm_up_is_not_judged() -> None:
    guards = book(limit(warmup=2))
    assert not guards.observe_canary({"m": 2.0}, step=1).events
    assert answers(guards, [2, 2, 2]) == ["", "", "log"]
    assert not guards.observe_canary({"m": 2.0}).events
    assert guards.observe_canary({"m": 2.0}, step=3).events


def test_a_canary_without_a_guards_metric_leaves_it_out() -> None:
    assert book(limit()).observe_canary({"other": 2.0}) == StepFirings(0)


def test_two_guards_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two guards are named 'temperature'"):
        GuardBook((*DEFAULT_GUARDS, next(guard for guard in DEFAULT_GUARDS if guard.name == "temperature")))


def test_the_loop_can_ask_beforehand_what_it_may_have_to_do() -> None:
    guards = book(limit(actions=["warn", ["raise_precision(infer)", "stop"]]))
    assert {str(action) for action in guards.declared_actions} == {"warn", "raise_precision(infer)", "stop"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LEVELS_K3)
@pytest.mark.parametrize("fault", [sync_skipped, overflow_each_step])
def test_a_book_resumed_again_and_again_decides_as_an_uninterrupted_one(dtype: str, fault: Any) -> None:
    def decisions(interrupted_after: Sequence[int]) -> list[StepFirings]:
        run, guards = Run(dtype, 3, fault), GuardBook(DEFAULT_GUARDS)
        found = [guards.observe_canary(run.canary())]
        for step, metrics in run.steps(60):
            if step - 1 in interrupted_after:
                state = json.loads(json.dumps(guards.state(), allow_nan=False))
                guards = GuardBook(DEFAULT_GUARDS)
                guards.restore(state)
            found.append(guards.evaluate(step, metrics))
        return found

    assert decisions([0, 5, 31, 33, 50]) == decisions([])


def test_a_state_that_was_taken_does_not_change_with_the_book() -> None:
    run, guards = Run("bf16", 0), GuardBook(DEFAULT_GUARDS)
    guards.observe_canary(run.canary())
    steps = run.steps(20)
    guards.evaluate(*next(steps))
    state = guards.state()
    before = json.dumps(state)
    for step, metrics in steps:
        guards.evaluate(step, metrics)
    assert json.dumps(state) == before != json.dumps(guards.state())


def test_a_state_of_the_version_before_is_read() -> None:
    """Its settings lack what this version added, and its `growth` remembered plain values."""
    growth = limit(rule="growth", ratio=2, window=2, reference=4)
    del growth["above"]
    guards = book(growth)
    answers(guards, [1, 1, 1])
    (saved,) = guards.state()["guards"]
    old = {name: value for name, value in saved["settings"].items() if name not in ("error", "errors")}
    rule = {"recent": [1.0, 1.0], "earlier": [1.0]}
    resumed = book(growth)
    resumed.restore({"evaluated": True, "guards": [{**saved, "settings": old, "rule": rule}]})
    assert answers(resumed, [1, 3, 3]) == answers(guards, [1, 3, 3]) == ["", "", "log"]


@pytest.mark.parametrize("factor", [10.5, 20.0, 100.0])
def test_a_rate_that_jumped_is_brought_back_to_its_level(factor: float) -> None:
    """Every later step has the rate as the answers left it; one answer is enough."""
    (settings,) = [guard for guard in DEFAULT_GUARDS if guard.name == "learning-rate-jump"]
    guards, left, rates, fired = GuardBook((settings,)), 1.0, [], []
    for step in range(1, 41):
        rate = left * 1e-4 * (factor if step > 8 else 1.0)
        decision = guards.evaluate(step, {"optim/learning_rate": rate})
        fired += decision.events
        for action in decision.actions:
            left *= action.factor or 1.0
        rates.append(rate)
    assert [event.step for event in fired] == [9]
    assert GuardEvent.from_json(fired[0].as_json()) == fired[0]
    assert rates[9:] == pytest.approx([1e-4] * 31, rel=0.05)
    assert [len(str(action.factor)) <= 6 for action in fired[0].actions if action.factor] == [True]


def test_only_a_change_of_a_learning_rate_can_go_back_to_a_level() -> None:
    with pytest.raises(UsageError, match="needs the rule growth on a learning rate"):
        book(limit(actions=["lower_learning_rate(level)"]))


@pytest.mark.parametrize(
    ("rule", "values", "first_bad"),
    [
        ({"rule": "growth", "ratio": 2, "window": 3, "direction": "down"}, [8.0] * 9 + [1.0] * 2, 9),
        ({"rule": "cusum", "scale": "raw", "spread": 1, "window": 4, "h": 5, "k": 0.5}, [1.0] * 9 + [3.0] * 4, 10),
    ],
    ids=["growth", "cusum"],
)
def test_a_breach_is_as_old_as_the_steps_it_rests_on(rule: dict[str, Any], values: list[float], first_bad: int) -> None:
    table = limit(**rule, actions=["rollback"])
    del table["above"]
    guards = book(table)
    answers(guards, values)
    assert guards.doubted_since == first_bad


def test_a_state_of_other_guards_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the guards differ .* --guards"):
        book(limit(above=2)).restore(book(limit()).state())


def test_what_fired_at_the_canary_fires_once_for_the_first_step() -> None:
    guards = book(limit(actions=["warn", "stop"]))
    assert [str(action) for action in guards.observe_canary({"m": 2.0}).actions] == ["warn"]
    assert guards.evaluate(1, {"m": 2.0}).events == ()
    assert [str(action) for action in guards.evaluate(2, {"m": 2.0}).actions] == ["stop"]


def test_a_rate_is_lowered_to_what_moved_the_policy_as_far_as_before() -> None:
    """The shift grows with the square of the rate: four hundred times the shift is twenty times the rate."""
    guards = book(
        {
            "name": "g",
            "rule": "growth",
            "metric": "update/policy_shift_k3",
            "ratio": 100,
            "actions": ["lower_learning_rate(level)"],
        }
    )
    for step in range(1, 6):
        assert guards.evaluate(step, {"update/policy_shift_k3": 1e-4}).actions == ()
    [action] = guards.evaluate(6, {"update/policy_shift_k3": 0.04}).actions
    assert action.factor == pytest.approx(1 / 20)
    [action] = guards.evaluate(7, {"update/policy_shift_k3": 1e4}).actions
    assert action.factor == 0.01
