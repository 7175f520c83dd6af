"""Guards of a run's course: slow changes are seen, and what a sound run does is not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import GuardEvent
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.rules import DEFAULT_GUARDS, parse_guards
from tests.guards.streams import Metrics, Run

Course = Callable[[Metrics, int], None]

COURSE_GUARDS = DEFAULT_GUARDS[[guard.name for guard in DEFAULT_GUARDS].index("gradient-size") :]
"""Those of changes over many steps, the last of the defaults."""


def watched(course: Course, steps: int, onset: int = 20) -> tuple[list[GuardEvent], dict[int, Metrics]]:
    book, events, history = GuardBook(COURSE_GUARDS), [], {}
    for step, metrics in Run("bf16", seed=3, fault=course, onset=onset).steps(steps):
        events += book.evaluate(step, metrics).events
        history[step] = metrics
    return events, history


def first_of(guard: str, events: list[GuardEvent]) -> GuardEvent:
    assert {event.guard for event in events} == {guard}
    return events[0]


def cause_at(step: int, events: list[GuardEvent], history: dict[int, Metrics]) -> EndCause:
    window = {past: metrics for past, metrics in history.items() if step - 16 < past <= step}
    return diagnose(window, [event for event in events if event.step <= step]).cause


def test_gradients_that_are_never_unscaled_are_warned_of_at_the_second_step_and_named() -> None:
    def unscaled(metrics: Metrics, age: int) -> None:
        metrics["optim/grad_norm"] *= 4096

    events, history = watched(unscaled, 24)
    seen = first_of("gradient-size", events)
    assert (seen.step, [str(action) for action in seen.actions]) == (21, ["warn"])
    assert cause_at(21, events, history) is EndCause.GRADIENT_SCALE


def test_a_gradient_three_times_the_largest_before_is_none() -> None:
    def larger(metrics: Metrics, age: int) -> None:
        metrics["optim/grad_norm"] = 6.0

    assert watched(larger, 40)[0] == []


def lost_entropy(reward: Callable[[int], float]) -> Course:
    """From 0.036 to 0.005 nats in 40 steps."""

    def course(metrics: Metrics, age: int) -> None:
        metrics["policy/entropy"] = 0.036 * (0.005 / 0.036) ** min(1.0, age / 40)
        metrics["reward/mean"] = reward(age) + 0.03 * np.sin(age)

    return course


def test_an_entropy_that_falls_with_the_reward_is_warned_of_and_named() -> None:
    events, history = watched(lost_entropy(lambda age: 0.48 - 0.16 * min(1.0, age / 40)), 66, onset=1)
    seen = next(event for event in events if event.guard == "entropy-collapse")
    assert 30 < seen.step <= 60
    assert "while the mean reward went from" in seen.sentence
    assert cause_at(seen.step, events, history) is EndCause.ENTROPY_COLLAPSE


@pytest.mark.slow
def test_an_entropy_that_falls_while_the_reward_rises_or_stays_is_left_alone() -> None:
    for reward in (lambda age: 0.48 + 0.3 * min(1.0, age / 40), lambda age: 0.9):
        assert watched(lost_entropy(reward), 100, onset=1)[0] == []


def test_an_entropy_that_is_gone_within_a_few_steps_is_warned_of_whatever_is_earned() -> None:
    def gone(metrics: Metrics, age: int) -> None:
        metrics["policy/entropy"] = 1e-4
        metrics["reward/mean"] = 0.95

    assert first_of("entropy-lost", watched(gone, 60)[0]).step < 60


COLLAPSE = [1.05, 1.06, 1.01, 1.11, 1.05, 1.07, 0.66, 0.56, 0.43, 0.3, 0.16, 0.14, 0.071, 0.053, 0.038, 0.029, 0.021]
"""Nats: as measured with an entropy bonus of the wrong sign; it went on to a thousandth."""


def test_an_entropy_that_a_real_run_lost_within_ten_steps_is_seen_however_fast_it_fell() -> None:
    """All responses are cut at the end, and earn alike; that is what comes of it."""

    def collapse(metrics: Metrics, age: int) -> None:
        metrics["policy/entropy"] = COLLAPSE[age] if age < len(COLLAPSE) else 0.02 * 0.8 ** (age - len(COLLAPSE))
        metrics["reward/mean"] = metrics["reward/mean_error"] = 0.0
        metrics["reward/whole_range"] = 0.0 if age > 9 else 1.0

    events, history = watched(collapse, 24, onset=1)
    seen = next(event for event in events if event.guard == "entropy-lost")
    assert seen.step <= 21
    assert cause_at(seen.step, events, history) is EndCause.ENTROPY_COLLAPSE


def test_constant_rewards_are_no_gradient_of_another_scale() -> None:
    book, history, events = GuardBook(DEFAULT_GUARDS), {}, []
    constant = {
        "reward/mean": 0.5,
        "reward/mean_error": 0.0,
        "reward/whole_range": 0.0,
        "reward/flat_groups_share": 1.0,
    }
    run = Run(
        "bf16",
        3,
        fault=lambda metrics, age: metrics.update({**constant, "optim/grad_norm": 0.0, "optim/loss": 0.0}),
        onset=8,
    )
    book.observe_canary(run.canary())
    for step, metrics in run.steps(24):
        events += book.evaluate(step, metrics).events
        history[step] = metrics
    assert {event.guard for event in events} == {"constant-reward", "flat-groups"}
    assert cause_at(23, events, history) is EndCause.FLAT


@pytest.mark.parametrize("share", ["rejected", "clipped"])
def test_a_correction_that_takes_out_less_while_the_mismatch_grows_is_warned_of_and_named(share: str) -> None:
    def parting(metrics: Metrics, age: int) -> None:
        metrics["mismatch/kl_k3"] *= 1 + age / 4
        metrics[f"correction/{share}_share"] = max(0.0, 0.1 - 0.0015 * age)

    events, history = watched(parting, 90)
    seen = first_of(f"{share}-falls", events)
    history[seen.step]["mismatch/logit_error"] = 1.0
    assert cause_at(seen.step, events, history) is EndCause.NARROW_BAND


def test_a_correction_that_takes_out_more_where_the_mismatch_grows_is_left_alone() -> None:
    def together(metrics: Metrics, age: int) -> None:
        metrics["mismatch/kl_k3"] *= 1 + age / 4
        metrics["correction/rejected_share"] = 0.02 + 0.001 * age

    assert watched(together, 90)[0] == []


def rewards_of_one_prompt(level: Callable[[int], float], steps: int, seed: int) -> list[tuple[int, str]]:
    """Four responses each earn 1 or -1; how likely they are right varies with the problem."""
    random = np.random.default_rng(seed)
    book = GuardBook(tuple(guard for guard in COURSE_GUARDS if guard.name == "reward-decline"))
    answers = []
    for step in range(1, steps + 1):
        right = (level(step) + 1) / 2
        difficulty = random.beta(4 * right + 0.05, 4 * (1 - right) + 0.05)
        rewards = np.where(random.random(4) < difficulty, 1.0, -1.0)
        metrics = RewardTotals.of(rewards, np.zeros(4, dtype=int), None).metrics()
        answers += [(step, str(action)) for action in book.evaluate(step, metrics).actions]
    return answers


@pytest.mark.parametrize("seed", range(6))
def test_a_reward_of_one_prompt_a_step_that_falls_over_35_steps_is_warned_of_and_rolled_back(seed: int) -> None:
    answers = rewards_of_one_prompt(lambda step: 1 - 1.9 * min(1.0, max(0, step - 25) / 35), 75, seed)
    assert [action for _, action in answers][:2] == ["warn", "rollback"]
    assert 26 < answers[0][0] <= 65


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.0, 0.4, 0.8])
def test_a_reward_of_one_prompt_a_step_that_stays_is_no_decline(level: float) -> None:
    assert [rewards_of_one_prompt(lambda step: level, 150, seed) for seed in range(6)] == [[]] * 6


def test_a_decline_that_a_rollback_takes_away_does_not_stop_the_run() -> None:
    book = GuardBook(tuple(guard for guard in COURSE_GUARDS if guard.name == "reward-decline"))
    actions: list[str] = []
    back_at = None
    for step in range(1, 140):
        level = 0.8 if back_at or step < 30 else max(0.0, 0.8 - 0.02 * (step - 30))
        metrics = {"reward/mean": level + 0.05 * np.sin(step), "reward/mean_error": 0.05}
        actions += map(str, book.evaluate(step, metrics).actions)
        if "rollback" in actions and back_at is None:
            back_at = step
    assert back_at is not None
    assert "stop" not in actions


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"window": 6}, "window"),
        ({"ratio": 1}, "ratio"),
        ({"other_error": "reward/mean_error"}, "give other, too"),
    ],
)
def test_a_trend_that_could_not_work_is_refused(table: dict[str, Any], problem: str) -> None:
    own = {"name": "g", "rule": "trend", "metric": "reward/mean", "ratio": 2, "actions": ["log"], **table}
    with pytest.raises(UsageError, match=problem):
        parse_guards({"guard": [own]}, "own.toml")
