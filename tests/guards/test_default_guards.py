"""The guards a user leaves alone: silent on clean runs, and each fault caught within two steps and answered."""

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.actions import Action, ActionKind
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import GuardEvent
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from tests.guards.streams import (
    LEVELS_K3,
    Fault,
    Metrics,
    Run,
    all_truncated,
    applied_unseen_times_100,
    dead_fp16,
    end_tokens_dropped,
    last_layer_never_synced,
    learning_rate_times_100,
    one_layer_a_hundredth_off,
    one_layer_perturbed,
    one_layer_perturbed_a_little,
    one_probe_token_routed_elsewhere,
    overflow_each_step,
    reward_late,
    reward_nan,
    sampled_at_another_temperature,
    sync_skipped,
    temperature_on_one_side,
    tenfold_rewards,
    unsure_tokens_at_another_temperature,
)

pytestmark = pytest.mark.slow

FAULTS: dict[str, tuple[Fault, str, EndCause]] = {
    "sync skipped": (sync_skipped, "stale-engine", EndCause.STALE_SYNC),
    "last layer never synced": (last_layer_never_synced, "unsynced-weights", EndCause.PARTIAL_SYNC),
    "one layer a hundredth off": (one_layer_a_hundredth_off, "other-weights", EndCause.PARTIAL_SYNC),
    "temperature on one side": (temperature_on_one_side, "temperature", EndCause.TEMPERATURE),
    "one layer perturbed": (one_layer_perturbed, "engine-weights", EndCause.ENGINE_WEIGHTS),
    "one layer perturbed a little": (one_layer_perturbed_a_little, "engine-layer", EndCause.ENGINE_WEIGHTS),
    "sampled at another temperature": (sampled_at_another_temperature, "sampling", EndCause.TEMPERATURE),
    "drawn at another temperature": (unsure_tokens_at_another_temperature, "draws", EndCause.TEMPERATURE),
    "end tokens dropped": (end_tokens_dropped, "no-end", EndCause.NO_END),
    "rewards of another range": (tenfold_rewards, "reward-range", EndCause.REWARD_SCALE),
    "reward NaN": (reward_nan, "reward-nonfinite", EndCause.REWARD_NAN),
    "reward too late": (reward_late, "reward-seconds", EndCause.REWARD_LATE),
    "learning rate times 100": (learning_rate_times_100, "learning-rate-jump", EndCause.LEARNING_RATE),
    "a rate that is not reported": (applied_unseen_times_100, "update-size", EndCause.LEARNING_RATE),
    "overflow each step": (overflow_each_step, "overflow", EndCause.FP16_DEAD),
    "dead FP16": (dead_fp16, "dead-run", EndCause.FP16_DEAD),
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
    if guard == "reward-range":
        onset = max(onset, 5)  # the highest reward of fewer than four steps says little of what may come
    if guard == "learning-rate-jump":
        onset = max(onset, 15)  # the warm-up takes ten steps
    events, history = watched(Run(dtype, seed=0, fault=inject, onset=onset), onset + 1)
    assert min(event.step for event in events) >= onset
    assert guard in {event.guard for event in events}
    last = {step: metrics for step, metrics in history.items() if step > onset - 12}
    assert diagnose(last, events).cause is cause


def test_a_fault_that_the_answer_does_not_mend_ends_in_stop() -> None:
    events, _ = watched(Run("bf16", seed=1, fault=sync_skipped), 34)
    answers = [[str(action) for action in event.actions] for event in events if event.guard == "stale-engine"]
    assert answers == [*[["skip_update", "resync"]] * 4, ["stop"]]


def test_a_reward_that_is_no_number_once_costs_one_update() -> None:
    def once(metrics: Metrics, age: int) -> None:
        if age == 0:
            reward_nan(metrics, age)

    events, _ = watched(Run("bf16", seed=1, fault=once), 80)
    assert {(event.guard, str(event.actions[0])) for event in events} == {
        ("reward-nonfinite", "warn"),
        ("loss-nonfinite", "skip_update"),
        ("gradient-nonfinite", "skip_update"),
    }


def test_a_batch_that_is_all_right_is_not_a_dead_run() -> None:
    def all_right(metrics: Metrics, age: int) -> None:
        metrics["optim/loss"] = metrics["optim/grad_norm"] = 0.0
        metrics["reward/mean"] = 1.0

    assert watched(Run("fp16", seed=2, fault=all_right), 90)[0] == []


def truncated(fault: Fault, steps: int) -> list[tuple[int, str]]:
    """When the guard on truncation fires from the first step on, and what it asks for."""
    events, _ = watched(Run("fp16", seed=4, fault=fault, onset=1), steps)
    return [(event.step, str(event.actions[0])) for event in events if event.guard == "truncated"]


def test_responses_that_are_all_cut_and_teach_nothing_are_warned_of_and_then_stop_the_run() -> None:
    assert truncated(all_truncated, 12) == [(3, "warn"), (6, "warn"), (9, "warn"), (12, "stop")]
    _, history = watched(Run("fp16", seed=4, fault=all_truncated, onset=1), 12)
    found = diagnose(history, [])
    assert found.cause is EndCause.TRUNCATED
    assert "--max-new-tokens" in str(found)
    stop = Action(ActionKind.STOP)
    of_mismatch, of_learning = (
        GuardEvent(12, name, "limit", metric, 1.0, 0.1, 1, (stop,), "it stopped")
        for name, metric in (("mismatch-limit", "mismatch/kl_k3"), ("truncated", "optim/grad_norm"))
    )
    assert diagnose(history, [of_learning]).cause is EndCause.TRUNCATED
    assert diagnose(history, [of_learning, of_mismatch]).cause is not EndCause.TRUNCATED


def test_few_responses_that_end_change_nothing_where_none_teaches_anything() -> None:
    def nearly_all(metrics: Metrics, age: int) -> None:
        all_truncated(metrics, age)
        metrics["response/truncated_share"] = 0.95

    assert truncated(nearly_all, 3) == [(3, "warn")]


def test_a_run_that_truncates_everything_and_learns_is_left_alone() -> None:
    def cut_and_learning(metrics: Metrics, age: int) -> None:
        metrics["response/truncated_share"] = 1.0
        metrics["optim/grad_norm"] = metrics["optim/grad_norm"] or 0.3

    assert truncated(cut_and_learning, 100) == []


def test_a_run_that_learns_now_and_then_is_warned_and_never_stopped() -> None:
    def now_and_then(metrics: Metrics, age: int) -> None:
        all_truncated(metrics, age)
        metrics["optim/grad_norm"] = 0.3 if age % 5 == 4 else 0.0

    assert {action for _, action in truncated(now_and_then, 100)} == {"warn"}


def test_a_solved_task_is_not_a_truncated_one() -> None:
    def solved(metrics: Metrics, age: int) -> None:
        metrics["optim/loss"] = metrics["optim/grad_norm"] = 0.0
        metrics["reward/mean"] = 1.0
        metrics["response/truncated_share"] = 0.01

    assert truncated(solved, 40) == []


def test_a_probe_token_that_is_routed_elsewhere_is_not_taken_for_wrong_weights() -> None:
    events, _ = watched(Run("bf16", seed=3, fault=one_probe_token_routed_elsewhere), 90)
    assert events == []


def test_a_slow_collapse_is_warned_of_before_the_mismatch_reaches_its_limit() -> None:
    def growing(metrics: Metrics, age: int) -> None:
        metrics["mismatch/kl_k3"] *= 1.15**age

    events, _ = watched(Run("bf16", seed=0, fault=growing), 80)
    first = {event.guard: event.step for event in reversed(events)}
    assert first["mismatch-drift"] < first["mismatch-floor"] < first["mismatch-limit"]


@pytest.mark.parametrize(("top_p", "fires"), [(0.9, True), (1.0, False)])
def test_a_hidden_top_p_shows_at_low_entropy_where_it_moves_the_mean_ratio_by_little(top_p: float, fires: bool) -> None:
    """pi is sure of most tokens; mu renormalises over the most likely ones. The sides differ by a small noise too."""
    random = np.random.default_rng(5)
    guards = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "support"))
    fired = []
    for step in range(1, 31):
        sure = random.beta(30, 1, 600)
        kept = np.where(sure > top_p, 1.0, sure)
        is_first = random.random(600) < kept
        log_pi = np.log(np.where(is_first, sure, 1 - sure))
        log_mu = np.log(np.where(is_first, kept, 1 - kept))
        error = random.normal(0, 0.01, 600)
        log_pi += error * np.where(is_first, 1 - sure, -sure)
        entropy = -(sure * np.log(sure) + (1 - sure) * np.log1p(-sure))
        log_pi, log_mu, entropy = (values.reshape(10, 60) for values in (log_pi, log_mu, entropy))
        metrics = Batch(log_pi, log_mu, True, entropy=entropy).measure().metrics()
        assert 0.95 < metrics["mismatch/is_ratio_mean"] < 1.05
        fired += [event.step for event in guards.evaluate(step, metrics).events]
    assert fired[:1] == ([2] if fires else [])


@pytest.mark.parametrize(("paired", "answers"), [(False, ["rollback", "stop"]), (True, [])])
def test_rewards_of_other_responses_are_undone_and_stop_the_run_and_a_judge_by_chance_does_not(
    paired: bool, answers: list[str]
) -> None:
    """Each step a reward is asked for again four times; three of ten answers differ."""
    random = np.random.default_rng(0)

    def asked_again(metrics: Metrics, age: int) -> None:
        differ = int((random.random(4) < 0.3).sum())
        with_second = int(random.binomial(differ, 0.5)) if paired else differ
        metrics["reward/unrepeated"] = float(differ)
        metrics["reward/mispaired"] = 2.0 * with_second - differ
        metrics["reward/mispaired_error"] = float(np.sqrt(differ))

    events, _ = watched(Run("bf16", seed=4, fault=asked_again, onset=10), 300 if paired else 40)
    assert [str(event.actions[0]) for event in events if event.guard == "reward-pairing"][:2] == answers


@pytest.mark.parametrize(
    ("values", "guard", "first"),
    [
        ({"reward/whole_range": 0.0}, "constant-reward", 45),
        ({"optim/grad_norm": 0.0, "reward/flat_groups_share": 1.0}, "flat-groups", 45),
        ({"response/truncated_share": 1.0}, "all-truncated", 37),
        ({"reward/unrepeated": 1.0}, "reward-repeat", 32),
    ],
)
def test_a_run_that_goes_on_and_learns_nothing_is_named_and_not_stopped(
    values: Metrics, guard: str, first: int
) -> None:
    events, _ = watched(Run("bf16", seed=2, fault=lambda metrics, age: metrics.update(values)), 80)
    named = [event for event in events if event.guard == guard]
    assert (named[0].step, str(named[0].actions[0])) == (first, "warn")
    assert {str(action) for event in named for action in event.actions} == {"warn", "log"}


def test_every_default_says_where_its_threshold_comes_from() -> None:
    assert all(guard.source for guard in DEFAULT_GUARDS)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("wrong", [0.0, -1.0, -0.05])
def test_one_prompt_a_step_that_is_solved_or_not_is_no_collapse_and_no_other_reward(wrong: float, seed: int) -> None:
    """A policy that does not move, four responses a step: most problems are solved by all or by none of them."""
    random = np.random.default_rng(seed)
    guards = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name in ("reward-collapse", "reward-range")))
    fired = []
    for step in range(1, 61):
        rewards = np.where(random.random(4) < random.beta(0.3, 0.3), 1.0, wrong)
        fired += guards.evaluate(step, RewardTotals.of(rewards, np.zeros(4, dtype=int), None).metrics()).events
    assert not {action.kind for event in fired for action in event.actions} & {ActionKind.ROLLBACK, ActionKind.STOP}


@pytest.mark.parametrize("prompts", [1, 2, 8])
@pytest.mark.parametrize("kind", ["heavy tail", "rare and large"])
def test_a_rare_large_reward_is_no_other_reward_function(kind: str, prompts: int) -> None:
    random = np.random.default_rng(prompts)
    guards = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name in ("reward-scale", "reward-range")))
    fired = []
    for step in range(1, 201):
        rewards = np.exp(2 * random.standard_normal(4 * prompts))
        if kind == "rare and large":
            rewards = np.where(random.random(4 * prompts) < 0.05, 1.0, 0.02)
        metrics = RewardTotals.of(rewards, np.repeat(np.arange(prompts), 4), None).metrics()
        fired += guards.evaluate(step, metrics).events
    assert fired == []
    totals = RewardTotals.of(
        np.full(4 * prompts, 1e4 if kind == "heavy tail" else 1e3), np.repeat(np.arange(prompts), 4), None
    )
    answers = [list(map(str, guards.evaluate(step, totals.metrics()).actions)) for step in (201, 202)]
    assert answers == [[], ["skip_update"]]
