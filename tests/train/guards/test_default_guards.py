"""The guards a user leaves alone: silent on clean runs, and each fault caught within two steps and answered."""

import pytest

from mismatch_probe.train.guards.book import GuardBook
from mismatch_probe.train.guards.decision import GuardEvent
from mismatch_probe.train.guards.defaults import DEFAULT_GUARDS
from mismatch_probe.train.guards.diagnose import Cause, diagnose
from tests.train.guards.streams import (
    LEVELS_K3,
    Fault,
    Metrics,
    Run,
    applied_unseen_times_100,
    dead_fp16,
    learning_rate_times_100,
    one_layer_perturbed,
    one_layer_perturbed_a_little,
    one_probe_token_routed_elsewhere,
    overflow_each_step,
    reward_nan,
    sampled_at_another_temperature,
    sync_skipped,
    temperature_on_one_side,
)

FAULTS: dict[str, tuple[Fault, str, Cause]] = {
    "sync skipped": (sync_skipped, "stale-engine", Cause.STALE_SYNC),
    "temperature on one side": (temperature_on_one_side, "temperature", Cause.TEMPERATURE),
    "one layer perturbed": (one_layer_perturbed, "engine-weights", Cause.ENGINE_WEIGHTS),
    "one layer perturbed a little": (one_layer_perturbed_a_little, "engine-layer", Cause.ENGINE_WEIGHTS),
    "sampled at another temperature": (sampled_at_another_temperature, "sampling", Cause.TEMPERATURE),
    "reward NaN": (reward_nan, "reward-nonfinite", Cause.REWARD_NAN),
    "learning rate times 100": (learning_rate_times_100, "learning-rate-jump", Cause.LEARNING_RATE),
    "a rate that is not reported": (applied_unseen_times_100, "update-size", Cause.LEARNING_RATE),
    "overflow each step": (overflow_each_step, "overflow", Cause.FP16_DEAD),
    "dead FP16": (dead_fp16, "dead-run", Cause.FP16_DEAD),
}


def watched(run: Run, steps: int) -> tuple[list[GuardEvent], dict[int, Metrics]]:
    book = GuardBook(DEFAULT_GUARDS)
    events = list(book.observe_canary(run.canary()).events)
    history = {}
    for step, metrics in run.steps(steps):
        events += book.evaluate(step, metrics).events
        history[step] = metrics
    return events, history


@pytest.mark.parametrize("dtype", LEVELS_K3)
@pytest.mark.parametrize("seed", range(10))
def test_no_guard_fires_in_clean_runs(dtype: str, seed: int) -> None:
    assert watched(Run(dtype, seed), 150)[0] == []


@pytest.mark.parametrize("dtype", LEVELS_K3)
@pytest.mark.parametrize("onset", [3, 30, 90])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_within_two_steps_and_nothing_fires_before(fault: str, onset: int, dtype: str) -> None:
    inject, guard, cause = FAULTS[fault]
    events, history = watched(Run(dtype, seed=0, fault=inject, onset=onset), onset + 1)
    assert min(event.step for event in events) >= onset
    assert guard in {event.guard for event in events}
    last = {step: metrics for step, metrics in history.items() if step > onset - 12}
    assert diagnose(last, events).cause is cause


def test_a_fault_that_the_answer_does_not_mend_ends_in_stop() -> None:
    events, _ = watched(Run("bf16", seed=1, fault=sync_skipped), 31)
    answers = [[str(action) for action in event.actions] for event in events if event.guard == "stale-engine"]
    assert answers == [["skip_update", "resync"], ["stop"]]


def test_a_reward_that_is_no_number_once_costs_one_update() -> None:
    def once(metrics: Metrics, age: int) -> None:
        if age == 0:
            reward_nan(metrics, age)

    events, _ = watched(Run("bf16", seed=1, fault=once), 80)
    assert {(event.guard, str(event.actions[0])) for event in events} == {
        ("reward-nonfinite", "skip_update"),
        ("loss-nonfinite", "skip_update"),
    }


def test_a_batch_that_is_all_right_is_not_a_dead_run() -> None:
    def all_right(metrics: Metrics, age: int) -> None:
        metrics["optim/loss"] = metrics["optim/grad_norm"] = 0.0
        metrics["reward/mean"] = 1.0

    assert watched(Run("fp16", seed=2, fault=all_right), 90)[0] == []


def test_a_probe_token_that_is_routed_elsewhere_is_not_taken_for_wrong_weights() -> None:
    events, _ = watched(Run("bf16", seed=3, fault=one_probe_token_routed_elsewhere), 90)
    assert events == []


def test_a_slow_collapse_is_warned_of_before_the_mismatch_reaches_its_limit() -> None:
    def growing(metrics: Metrics, age: int) -> None:
        metrics["mismatch/kl_k3"] *= 1.15**age

    events, _ = watched(Run("bf16", seed=0, fault=growing), 80)
    first = {event.guard: event.step for event in reversed(events)}
    assert first["mismatch-drift"] < first["mismatch-floor"] < first["mismatch-limit"]


def test_every_default_says_where_its_threshold_comes_from() -> None:
    assert all(guard.source for guard in DEFAULT_GUARDS)
