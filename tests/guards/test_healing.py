"""What heals by itself does not end a run, and what stays does; a rate that was lowered is raised again."""

import json
import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from mismatch_probe.guards.diagnosis import GuardEvent
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.recovery import RAISED_AFTER
from mismatch_probe.guards.rules import parse_guards
from tests.guards.steps import RESPONSES, batch, fired

LEARNT = {"loss": 0.3, "grad_norm": 0.5, "learning_rate": 1e-5}
LOWERS = ["rollback", "lower_learning_rate(0.1)"]
pytestmark = pytest.mark.filterwarnings("ignore:guards that are off")


def stopped_at(guards: Guards, faulty: Sequence[int], steps: int, **fault: object) -> int | None:
    """The step at which the run is stopped, where the steps `faulty` have the fault."""
    for step in range(1, steps + 1):
        metrics = {"sync/weights_unchanged": float(step in faulty), "sync/weights_other": 0.0}
        given = fault if step in faulty else {}
        if guards.observe(batch(step, **given), metrics=metrics, **LEARNT).stop:
            return step
    return None


def one_lost() -> list[float]:
    return [float("nan"), *np.linspace(0, 1, RESPONSES - 1)]


CAN = {"skip", "stop", "resync", "leave_out", "rollback", "lower_learning_rate"}


@pytest.mark.slow
@pytest.mark.parametrize("can", [CAN, {"skip", "stop"}], ids=["leaves out", "skips"])
def test_one_reward_that_is_no_number_in_three_steps_three_apart_does_not_end_a_run(can: set[str]) -> None:
    assert stopped_at(Guards.default(can=can), [6, 9, 12], 24, rewards=one_lost()) is None


def test_one_reward_that_is_no_number_in_every_step_ends_it() -> None:
    assert stopped_at(Guards.default(can=CAN), range(6, 30), 29, rewards=one_lost()) == 10


@pytest.mark.slow
def test_a_sync_that_fails_for_three_steps_does_not_end_a_run_and_one_that_stays_does() -> None:
    assert stopped_at(Guards.default(can=CAN), [6, 7, 8], 24) is None
    assert stopped_at(Guards.default(can=CAN), range(6, 30), 29) == 10
    assert stopped_at(Guards.default(can=CAN), range(6, 40, 3), 39) == 18, "one that comes back stays"


@pytest.mark.slow
def test_rewards_that_are_lost_altogether_for_three_steps_do_not_end_a_run_and_for_good_they_do() -> None:
    lost = [float("inf")] * RESPONSES
    assert stopped_at(Guards.default(can=CAN), [6, 7, 8], 24, rewards=lost) is None
    assert stopped_at(Guards.default(can=CAN), range(6, 30), 29, rewards=lost) == 10


def test_a_response_without_a_reward_is_left_out_or_its_update_is_skipped() -> None:
    able, unable = Guards.default(can=CAN), Guards.default(can={"skip", "stop"})
    decisions = [guards.observe(batch(1, rewards=one_lost()), **LEARNT) for guards in (able, unable)]
    assert [(one.leave_out, one.skip, one.unsupported) for one in decisions] == [(True, False, ()), (False, True, ())]
    assert all("reward-nonfinite" in fired(one.events) for one in decisions)
    assert not any("reward-collapse" in fired(one.events) for one in decisions)


def test_metrics_of_rewards_are_of_those_that_are_numbers() -> None:
    """As those of the step without that response."""
    rewards, prompts = np.linspace(0, 1, RESPONSES), np.arange(RESPONSES) // 4
    complete_batch = batch(1, rewards=np.where(np.arange(RESPONSES) == 3, np.nan, rewards), prompt_ids=prompts)
    metrics = complete_batch.measure().metrics()
    kept = np.delete(rewards, 3)
    assert metrics["reward/nonfinite"] == 1
    assert metrics["reward/mean"] == pytest.approx(kept.mean())
    assert metrics["reward/std"] == pytest.approx(kept.std())
    assert metrics["reward/mean_error"] > 0


def rates(values: Sequence[float], actions: Sequence[object], guards: Guards | None = None) -> list[float]:
    """The share of the schedule that each step is learnt at."""
    table = {"name": "g", "rule": "limit", "metric": "m", "above": 1, "actions": actions}
    guards = guards or Guards(parse_guards({"defaults": False, "guard": [table]}, "guards.toml"), can=CAN)
    share, shares = 1.0, []
    for step, value in enumerate(values, start=1):
        share *= guards.observe(metrics={"m": value}, step=step).factor
        shares.append(share)
    return shares


def test_a_rate_that_was_lowered_with_a_rollback_is_raised_in_steps_and_never_above_the_schedule() -> None:
    shares = rates([0, 0, 2, *[0] * 60], [LOWERS])
    assert RAISED_AFTER == 10
    assert shares[2:13] == pytest.approx([0.1] * 10 + [0.2])
    assert [shares[step] for step in (22, 32, 42, 62)] == pytest.approx([0.4, 0.8, 1, 1])
    assert max(shares) == 1


def test_a_rate_that_was_lowered_without_a_rollback_stays_lowered() -> None:
    assert rates([0, 2, *[0] * 60], ["lower_learning_rate(0.5)"])[-1] == 0.5


def test_a_rate_that_had_to_be_lowered_again_is_not_raised_as_far() -> None:
    """It fires wherever the rate is above 0.3 of the schedule: each time the ceiling comes down."""
    table = {"name": "g", "rule": "limit", "metric": "m", "above": 0.3, "actions": [LOWERS]}
    guards = Guards(parse_guards({"defaults": False, "guard": [table]}, "guards.toml"), can=CAN)
    share, events = 1.0, list[GuardEvent]()
    for step in range(1, 401):
        decision = guards.observe(metrics={"m": share}, step=step)
        events += decision.events
        share *= decision.factor
    assert share == pytest.approx(0.2)
    assert len(events) == 2


@pytest.mark.parametrize(
    ("shift", "last"),
    [(0.045, 1.0), (0.2, (0.005 / 0.2) ** 0.5), (float("inf"), 0.1), (float("nan"), 1.0)],
    ids=["ordinary", "too large", "infinite", "not measured"],
)
def test_a_rate_whose_update_moved_the_policy_too_far_is_raised_to_where_such_an_update_is_ordinary(
    shift: float, last: float
) -> None:
    """The KL of an update grows with the square of its rate. An ordinary update moves the policy by 0.005 nats."""
    table = {"name": "g", "rule": "limit", "metric": "m", "above": 1, "actions": [LOWERS]}
    guards = Guards(parse_guards({"defaults": False, "guard": [table]}, "guards.toml"), can=CAN)
    share = 1.0
    for step in range(1, 64):
        values = {"m": 2.0 * (step == 3), "update/policy_shift_k3": shift if step == 2 else 1e-4}
        share *= guards.observe(metrics=values, step=step).factor
    assert share == pytest.approx(last)


def test_steps_that_are_not_clean_raise_no_rate() -> None:
    doubts = [2, *[0] * 8, 2, *[0] * 8, 2]
    assert rates(doubts, [LOWERS])[-1] == pytest.approx(0.001)


def test_guards_that_are_restored_raise_the_rate_at_the_same_step() -> None:
    table = {"name": "g", "rule": "limit", "metric": "m", "above": 1, "actions": [LOWERS]}
    guards, restored = (
        Guards(parse_guards({"defaults": False, "guard": [table]}, "guards.toml"), can=CAN) for _ in range(2)
    )
    for step in range(1, 8):
        guards.observe(metrics={"m": 2.0 * (step == 1)}, step=step)
    restored.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [
            [one.observe(metrics={"m": 0.0}, step=step).factor for step in range(8, 14)] for one in (guards, restored)
        ]
    assert outcomes[0] == outcomes[1] == [1, 1, 1, 2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faulty", "ends"), [(range(6, 9), False), (range(6, 40), True)], ids=["three steps", "for good"]
)
def test_labels_that_are_shifted_end_a_run_where_they_stay_so_and_not_where_they_come_back(
    faulty: range, ends: bool
) -> None:
    guards, stopped = Guards.default(can={"skip", "stop", "rollback"}), False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 30):
            sound = batch(step)
            log_pi = np.roll(np.asarray(sound.log_pi), 1, axis=1) if step in faulty else sound.log_pi
            stopped = stopped or guards.observe(batch(step, log_pi=log_pi)).stop
    assert stopped == ends


def test_a_small_surprise_of_every_step_is_still_added_up_after_a_large_one_is_over() -> None:
    table = {"rule": "mean", "metric": "mismatch/surprise_mean", "error": "mismatch/surprise_error", "window": 128}
    guards = Guards(parse_guards({"defaults": False, "guard": [{"name": "own", "actions": ["warn"], **table}]}, "own"))
    random = np.random.default_rng(0)
    seen = []
    for step in range(1, 100):
        mean = 9.0 if 10 <= step < 13 else 0.02 * (step > 40) + random.normal(0, 0.01)
        metrics = {"mismatch/surprise_mean": mean, "mismatch/surprise_error": 0.01}
        seen += [step] if guards.judge(step, metrics, canary=False).events else []
    assert seen[:3] == [10, 11, 12]
    assert 41 <= seen[3] <= 55
