"""The cause named at stop, from a dozen steps of metrics."""

import math
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import Diagnosis, GuardEvent
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from tests.guards.streams import LEVELS_K3, Metrics, Run


def clean(dtype: str = "bf16", seed: int = 0) -> dict[int, Metrics]:
    return {step: metrics for step, metrics in Run(dtype, seed).steps(40) if step > 28}


def ending(changes: dict[str, list[float]], **others: Any) -> Diagnosis:
    """The diagnosis of a clean run whose last steps have these values instead."""
    history = clean(**others)
    for name, values in changes.items():
        for step, value in zip(sorted(history)[-len(values) :], values, strict=True):
            history[step][name] = value
    return diagnose(history, [])


@pytest.mark.slow
def test_no_cause_is_made_up_for_a_clean_run() -> None:
    found = [diagnose(clean(dtype, seed), []) for dtype in LEVELS_K3 for seed in range(10)]
    assert {diagnosis.cause for diagnosis in found} == {EndCause.UNEXPLAINED}


def test_an_unexplained_stop_repeats_what_the_guards_saw() -> None:
    history = clean()
    history[40]["mismatch/ess_token"] = 0.1
    guards = GuardBook(DEFAULT_GUARDS)
    guards.observe_canary(history[29])
    events = [event for step in (39, 40) for event in guards.evaluate(step, history[40]).events]
    assert "ESS of tokens is 0.100, below its limit of 0.300" in diagnose(history, events).sentence


def test_nothing_is_diagnosed_from_nothing() -> None:
    assert diagnose({}, []).cause is EndCause.UNEXPLAINED


def test_an_engine_that_repeats_itself_has_old_weights() -> None:
    assert ending({"sync/engine_unchanged": [1.0]}).cause is EndCause.STALE_SYNC


def test_a_stale_engine_that_was_mended_long_ago_is_not_the_cause() -> None:
    assert ending({"sync/engine_unchanged": [1.0, 0, 0, 0, 0]}).cause is EndCause.UNEXPLAINED


def test_a_mismatch_that_a_resync_takes_away_was_a_stale_engine() -> None:
    history = clean()
    event = resync_event(39)
    history[39]["mismatch/kl_k3"] = 0.01
    assert diagnose(history, [event]).cause is EndCause.STALE_SYNC
    history[40]["mismatch/kl_k3"] = 0.01
    assert diagnose(history, [event]).cause is not EndCause.STALE_SYNC
    history[39]["mismatch/kl_k3"], history[40]["mismatch/kl_k3"] = 139.0, 7.3
    assert diagnose(history, [event]).cause is not EndCause.STALE_SYNC


def test_one_odd_temperature_fit_is_not_a_temperature() -> None:
    assert ending({"mismatch/temperature_fit": [1.3, 1.31]}).cause is EndCause.TEMPERATURE
    assert ending({"mismatch/temperature_fit": [1.3, 1.0]}).cause is EndCause.UNEXPLAINED


def test_a_large_update_and_what_followed() -> None:
    found = ending({"update/policy_shift_k3": [2.0, 1.0], "reward/mean": [0.1, 0.0]})
    assert found.cause is EndCause.LEARNING_RATE
    assert "moved the policy by 2 nats" in found.sentence
    assert "reward/mean fell to less than half" in found.sentence


def test_a_warm_up_of_the_rate_is_not_a_jump() -> None:
    assert ending({"optim/learning_rate": [1e-6 * step for step in range(1, 13)]}).cause is EndCause.UNEXPLAINED


def test_a_probe_that_jumps_after_a_sync_means_other_weights() -> None:
    assert ending({"sync/probe_logit_error": [0.01]}).cause is EndCause.ENGINE_WEIGHTS


def test_a_probe_token_that_is_routed_elsewhere_does_not() -> None:
    assert ending({"sync/probe_k3": [0.1]}).cause is EndCause.UNEXPLAINED


def test_one_digit_more_between_log_probs_of_a_sure_policy_is_no_jump() -> None:
    assert ending({"sync/probe_logit_error": [6e-4]}, dtype="fp16").cause is EndCause.UNEXPLAINED


def test_steps_after_a_probe_guard_fired_are_not_taken_for_the_level_before() -> None:
    history = clean("bf16")
    levels = [history[step]["sync/probe_logit_error"] for step in sorted(history)]
    history = {
        step: {**values, "sync/probe_logit_error": level * (4 if step > 32 else 1)}
        for (step, values), level in zip(sorted(history.items()), levels, strict=True)
    }
    guards = GuardBook(DEFAULT_GUARDS)
    guards.observe_canary(history[29])
    events = [event for step, values in history.items() for event in guards.evaluate(step, values).events]
    assert {event.guard for event in events} == {"engine-layer"}
    assert diagnose(history, events).cause is EndCause.ENGINE_WEIGHTS


def test_what_a_probe_guard_saw_long_ago_hides_no_jump_of_today() -> None:
    history = clean()
    history[40]["sync/probe_logit_error"] *= 20
    old = GuardEvent(3, "engine-weights", "growth", "sync/probe_logit_error", 1.0, 0.1, 1, (), "the probe jumped")
    assert diagnose(history, [old]).cause is EndCause.ENGINE_WEIGHTS
    assert "jumped" not in diagnose(clean(), [old]).sentence


def test_a_reward_of_another_scale_is_not_blamed_on_fp16() -> None:
    overflowing = {"optim/overflows_in_a_row": [1, 2, 3], "optim/loss_scale": [1024.0, 512.0, 256.0]}
    found = ending({"reward/largest": [1e30] * 2, "reward/mean": [3e29] * 2, **overflowing}, dtype="fp16")
    other = ending({"reward/largest": [90.0] * 2, "reward/typical": [80.0] * 2, **overflowing}, dtype="fp16")
    assert other.cause is EndCause.REWARD_SCALE
    assert ending({"reward/largest": [90.0] * 2, **overflowing}, dtype="fp16").cause is EndCause.FP16_DEAD
    assert found.cause is EndCause.REWARD_SCALE
    assert ending(overflowing, dtype="fp16").cause is EndCause.FP16_DEAD
    assert ending({"reward/largest": [5.0, 7.0]}).cause is EndCause.UNEXPLAINED


def test_a_reward_of_another_scale_is_skipped_at_once_and_stops() -> None:
    run, guards, answers = Run("fp16", 0), GuardBook(DEFAULT_GUARDS), []
    guards.observe_canary(run.canary())
    for step, metrics in run.steps(14):
        metrics["reward/largest"] = 1e30 if step > 9 else 1.0
        events = guards.evaluate(step, metrics).events
        answers += [(event.step, str(event.actions[0])) for event in events if event.guard == "reward-scale"]
    assert answers == [*((step, "skip_update") for step in range(10, 14)), (14, "stop")]


def test_log_probs_that_the_engine_left_out() -> None:
    missing = Batch(np.full(4, -1.0), [-1.0, np.nan, -1, -1], entropy=np.ones(4)).measure().metrics()
    history = clean()
    history[40] |= {**missing, "optim/loss": math.nan, "optim/overflows_in_a_row": 2.0}
    assert diagnose(history, []).cause is EndCause.MISSING_LOGPROBS
    overflowed = Batch(np.full(4, np.nan), np.full(4, -1.0), entropy=np.full(4, np.nan)).measure().metrics()
    history[40] |= overflowed
    assert diagnose(history, []).cause is EndCause.NONFINITE_GRADIENT


def test_labels_that_are_shifted_are_told_from_an_engine_with_other_weights() -> None:
    """Tokens of 64 drawn from peaked distributions; an engine with other weights draws them evenly."""
    random = np.random.default_rng(0)

    def distributions() -> np.ndarray:
        logits = random.normal(0, 4, (600, 64))
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    def metrics(log_mu: np.ndarray, log_pi: np.ndarray, *, shift: int) -> Metrics:
        tokens = np.array([random.choice(64, p=np.exp(row)) for row in log_mu])
        rows = np.arange(600)
        entropy = -(np.exp(log_pi) * log_pi).sum(axis=1)
        scored = log_pi[rows, np.roll(tokens, shift)]
        responses = (values.reshape(6, 100) for values in (scored, log_mu[rows, tokens], entropy))
        log_pi_of_tokens, log_mu_of_tokens, entropies = responses
        sides = Batch(log_pi_of_tokens, log_mu_of_tokens, True, entropy=entropies, computed_apart=True)
        return sides.measure().metrics()

    policy = distributions()
    uniform = np.full((600, 64), -np.log(64.0))
    for changed, cause in (
        (metrics(policy, policy, shift=1), EndCause.LABEL_OFFSET),
        (metrics(policy, policy, shift=0), EndCause.UNEXPLAINED),
        (metrics(uniform, policy, shift=0), EndCause.ENGINE_WEIGHTS),
    ):
        history = clean()
        probe_sees_it = {} if cause is EndCause.UNEXPLAINED else {"sync/probe_logit_error": 1.0}
        history[40] |= changed | probe_sees_it
        assert diagnose(history, []).cause is cause


def test_a_reward_that_jumps_while_the_policy_stays_is_another_reward_function() -> None:
    changed = {"reward/mean": [0.6] * 8 + [0.05, 0.06, 0.04, 0.05], "reward/mean_error": [0.05] * 12}
    found = ending(changed)
    assert found.cause is EndCause.REWARD_CHANGED
    assert "from 0.600 to 0.0500 at step 37, although no update moved the policy far" in found.sentence
    assert ending({**changed, "update/policy_shift_k3": [0.002] * 7 + [0.8]}).cause is EndCause.LEARNING_RATE
    noisy = {"reward/mean": [0.6] * 8 + [0.35] * 4, "reward/mean_error": [0.2] * 12}
    assert ending(noisy).cause is EndCause.UNEXPLAINED


def rounding(k3: list[float], **others: float) -> dict[str, list[float]]:
    """What symmetric errors of the size of a format's rounding leave."""
    shown = {"mismatch/logit_error": 0.03, "mismatch/is_ratio_mean": 1.0, **others}
    return {
        "mismatch/kl_k3": k3,
        "mismatch/logprob_diff_rms": [math.sqrt(2 * level) for level in k3],
        **{name: [value] * len(k3) for name, value in shown.items()},
    }


GROWING = [1e-5 * 1.25**step for step in range(12)]


def test_a_mismatch_that_grows_by_rounding_at_equal_weights_is_precision() -> None:
    found = ending(rounding(GROWING))
    assert found.cause is EndCause.PRECISION_DRIFT
    assert "errors of a logit of 0.0300 nats" in found.sentence


@pytest.mark.parametrize(
    "against",
    [
        {"mismatch/logit_error": 1.3},
        {"mismatch/is_ratio_mean": 0.9},
        {"mismatch/kl_k3": 1.0},
        {"sync/probe_logit_error": 0.3},
    ],
)
def test_what_rounding_would_not_do_is_not_called_precision(against: dict[str, float]) -> None:
    found = ending({**rounding(GROWING), **{name: [value] * 12 for name, value in against.items()}})
    assert found.cause is not EndCause.PRECISION_DRIFT


def test_a_mismatch_without_a_probe_or_digests_is_not_called_precision() -> None:
    history = {
        step: {name: value for name, value in values.items() if not name.startswith("sync/")}
        for step, values in clean().items()
    }
    for name, values in rounding(GROWING).items():
        for step, value in zip(sorted(history), values, strict=True):
            history[step][name] = value
    assert diagnose(history, []).cause is EndCause.UNEXPLAINED


def test_positions_that_jump_on_pis_side_are_no_learning_rate_where_the_engine_does_not_follow() -> None:
    """As measured with RoPE angles times 1.1 on the training path."""
    shown = {"update/policy_shift_k3": [1.0], "sync/probe_k3": [0.8], "sync/probe_logit_error": [0.067]}
    compared = {"sync/weights_compared": [1.0] * 12}
    assert ending({**shown, **compared}).cause is EndCause.COMPUTATION
    assert ending({**shown, **compared, "sync/probe_k3": [0.001]}).cause is EndCause.LEARNING_RATE


def test_a_reward_that_falls_by_updates_of_the_usual_size_is_not_blamed_on_the_rate() -> None:
    """As measured with the gradient's sign turned."""
    falling = {
        "update/policy_shift_k3": [2e-3, 1e-3, 2e-3, 2e-4, 7e-4, 1e-3, 3e-3, 7e-3, 1e-2, 8e-3, 9e-3, 8e-3],
        "reward/mean": [0.7, 0.6, 0.7, 0.6, 0.5, 0.6, 0.5, 0.4, 0.2, 0.3, 0.2, 0.1],
        "reward/mean_error": [0.1] * 12,
    }
    history = clean()
    for name, values in falling.items():
        for step, value in zip(sorted(history), values, strict=True):
            history[step][name] = value
    fell = GuardEvent(40, "reward-collapse", "growth", "reward/mean", 0.2, 0.3, 1, (), "the mean reward fell")
    found = diagnose(history, [fell])
    assert found.cause is EndCause.HARMFUL_UPDATES
    assert "sign" in str(found)


def resync_event(step: int) -> GuardEvent:
    run, guards = Run("bf16", 0), GuardBook(DEFAULT_GUARDS)
    guards.observe_canary(run.canary())
    metrics = next(run.steps(1))[1]
    return guards.evaluate(step, {**metrics, "sync/engine_unchanged": 1.0}).events[0]


def test_updates_that_grew_step_by_step_and_lost_the_reward_may_be_a_rate_or_a_sign() -> None:
    """As measured at eight times the rate; the other sign gave the like."""
    grown = {
        "update/policy_shift_k3": [5e-6, 1e-5, 7e-5, 8e-6, 1e-4, 9e-4, 4e-3, 7e-3, 6e-3, 7e-3],
        "reward/mean": [0.7, 0.8, 0.7, 0.75, 0.5, 0.25, 0.3, 0.1, 0.1, 0.0],
    }
    history = clean()
    for name, values in grown.items():
        for step, value in zip(sorted(history)[-len(values) :], values, strict=True):
            history[step][name] = value
    fell = GuardEvent(40, "reward-collapse", "growth", "reward/mean", 0.1, 0.3, 1, (), "the mean reward fell")
    found = diagnose(history, [fell])
    assert found.cause is EndCause.HARMFUL_UPDATES
    assert "a rate that is too high" in found.sentence
    assert diagnose(history, []).cause is EndCause.UNEXPLAINED


def test_one_update_that_went_far_beyond_the_usual_is_a_rate_that_is_too_high() -> None:
    found = ending({"update/policy_shift_k3": [1e-5] * 11 + [0.04]})
    assert found.cause is EndCause.LEARNING_RATE


def test_log_probs_of_the_trainer_that_are_no_numbers_leave_no_update() -> None:
    unmeasured = {"mismatch/nonfinite_tokens": [900.0], "mismatch/kl_k3": [math.nan]}
    found = ending({**unmeasured, "mismatch/missing_mu_tokens": [0.0]})
    assert found.cause is EndCause.NONFINITE_GRADIENT
    assert "of 900 tokens are missing or not finite" in found.sentence
    of_the_engine = ending({**unmeasured, "mismatch/missing_mu_tokens": [900.0]})
    assert of_the_engine.cause is EndCause.MISSING_LOGPROBS


def test_a_rate_that_is_too_high_from_the_start_has_no_usual_update_to_be_held_against() -> None:
    """As measured in FP16 at a rate of 1e-3."""
    lost = {
        "update/policy_shift_k3": [0.0, 0.006, 0.01, 0.0014, 0.0, 0.0, 0.0],
        "reward/mean": [0.62, 0.41, 0.31, 0.0, 0.0, 0.0, 0.0],
        "reward/mean_error": [0.11, 0.16, 0.12, 0.0, 0.0, 0.0, 0.0],
    }
    history = dict(list(clean().items())[:7])
    for place, metrics in enumerate(history.values()):
        metrics |= {name: values[place] for name, values in lost.items()}
    assert diagnose(history, []).cause is EndCause.LEARNING_RATE
    for metrics in history.values():
        metrics["update/policy_shift_k3"] /= 10
    assert diagnose(history, []).cause is not EndCause.LEARNING_RATE


def test_a_hidden_temperature_is_named_although_a_reward_of_few_responses_halved() -> None:
    """As measured in BF16 on a pretrained checkpoint, 8 responses a step; the size of each update is their mean."""
    series = {
        "reward/mean": [0.031, 0.092, 0.041, 0.043, 0.095, 0.051, 0.178, 0.591, 0.212],
        "update/policy_shift_k3": [0.00554] * 12,
        "sync/draw_surprise_mean": [0.05, 0.61, 0.26, -0.11, -0.46, 2.1, 2.19, 1.9, 2.38],
        "sync/draw_surprise_error": [0.41] * 9,
    }
    assert ending(series).cause is EndCause.TEMPERATURE
    assert ending({**series, "sync/draw_surprise_mean": [0.05, -0.2, 0.3] * 3}).cause is EndCause.LEARNING_RATE


def test_rewards_of_other_responses_are_told_from_a_judge_by_chance() -> None:
    errors = [1.5] * 12
    mixed_up = ending({"reward/mispaired": [2.0] * 12, "reward/mispaired_error": errors})
    assert mixed_up.cause is EndCause.REWARD_UNREPEATED
    assert "not the one that was learnt from" in mixed_up.sentence
    by_chance = ending({"reward/mispaired": [1.0, -1.0] * 6, "reward/mispaired_error": errors})
    assert by_chance.cause is not EndCause.REWARD_UNREPEATED


def test_tokens_that_the_engine_forbids_itself_are_told_from_rounding() -> None:
    cut = ending({"mismatch/is_ratio_mean": [0.9963] * 12, "mismatch/is_ratio_mean_error": [4e-4] * 12})
    assert cut.cause is EndCause.TEMPERATURE
    assert "0.370 % of what pi would sample" in cut.sentence
    for mean, error in ((0.9985, 1e-4), (0.9963, 4e-3)):
        sound = ending({"mismatch/is_ratio_mean": [mean] * 12, "mismatch/is_ratio_mean_error": [error] * 12})
        assert sound.cause is EndCause.UNEXPLAINED


def test_what_a_guard_added_up_over_more_steps_than_the_window_holds_is_named() -> None:
    guards = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "sampling"))
    noise = {"mismatch/surprise_mean": 0.02, "mismatch/surprise_error": 0.03}
    events = [event for step in range(1, 121) for event in guards.evaluate(step, noise).events]
    assert events[0].step > 60
    history = {step: {**metrics, **noise} for step, metrics in clean().items()}
    assert diagnose(history, []).cause is EndCause.UNEXPLAINED
    seen = diagnose({events[0].step: history[max(history)]}, events[:1])
    assert seen.cause is EndCause.TEMPERATURE
    assert "above what its entropy says" in seen.sentence
