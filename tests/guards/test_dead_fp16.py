"""A run that FP16 ended is named as that, and no other run is."""

import math

import numpy as np

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnose import diagnose
from tests.guards.test_diagnose import clean, ending

DEAD = {"optim/loss": [0.0], "optim/grad_norm": [0.0], "reward/mean": [math.nan], "reward/nonfinite": [8.0]}


def test_the_signature_of_a_dead_fp16_run() -> None:
    dead = ending({**DEAD, "mismatch/kl_k3": [math.nan]})
    assert dead.cause is EndCause.FP16_DEAD
    assert "loss 0, gradient norm 0 and reward NaN" in dead.sentence


def test_rewards_that_are_all_nan_are_no_dead_run_while_log_probs_are_finite() -> None:
    assert ending(DEAD).cause is EndCause.REWARD_NAN


def test_rewards_that_are_all_nan_are_no_dead_fp16_run_where_no_log_probs_tell() -> None:
    """As in a loop without vLLM, whose reward function gives no numbers."""
    history = {
        step: {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
        for step, metrics in clean().items()
    }
    history[max(history)] |= {name: values[-1] for name, values in DEAD.items()}
    assert diagnose(history, []).cause is EndCause.REWARD_NAN
    del history[max(history)]["reward/nonfinite"]
    assert diagnose(history, []).cause is EndCause.FP16_DEAD


def test_a_loss_scale_that_falls_without_a_finite_gradient_is_dead_fp16() -> None:
    found = ending({"optim/overflows_in_a_row": [1, 2, 3], "optim/loss_scale": [1024, 512, 256]}, dtype="fp16")
    assert found.cause is EndCause.FP16_DEAD
    assert "from 1,024 to 256" in found.sentence


def test_a_run_that_loses_most_updates_to_overflow_is_dying_fp16_whatever_its_rare_update_does() -> None:
    rare = {
        "optim/overflow": [1.0] * 9 + [0.0] * 3,
        "optim/loss_scale": [65536 / 2**lost for lost in range(1, 10)] + [128.0] * 3,
        "update/policy_shift_k3": [0.0] * 11 + [0.6],
    }
    found = ending(rare, dtype="fp16")
    assert found.cause is EndCause.FP16_DEAD
    assert "9 of the last 12 updates were lost to overflow" in found.sentence
    assert "from 32,768 to 128" in found.sentence


def test_a_scale_that_probes_its_edge_now_and_then_is_not_dying() -> None:
    edge = {"optim/overflow": [0.0, 0.0, 1.0] * 4, "optim/loss_scale": [1024.0, 2048.0, 1024.0] * 4}
    assert ending(edge, dtype="fp16").cause is EndCause.UNEXPLAINED


def test_updates_that_were_lost_are_no_measure_of_a_usual_one() -> None:
    small = ending({"update/policy_shift_k3": [0.0] * 8 + [0.05, 0.06, 0.05, 0.2]}, dtype="bf16")
    assert small.cause is not EndCause.LEARNING_RATE
    large = ending({"update/policy_shift_k3": [0.0] * 8 + [0.005, 0.006, 0.005, 0.2]}, dtype="bf16")
    assert large.cause is EndCause.LEARNING_RATE


def test_gradients_that_overflow_without_a_scale_are_not_blamed_on_fp16() -> None:
    assert ending({"optim/overflows_in_a_row": [1, 2]}).cause is EndCause.NONFINITE_GRADIENT
    assert "the loss is infinite" in ending({"optim/loss": [math.inf]}).sentence


def test_weights_that_a_gradient_spoiled_are_not_blamed_on_the_engine() -> None:
    """Neither side gives a log-prob once an update has made the weights NaN."""
    spoiled = Batch(np.full(4, np.nan), np.full(4, np.nan), entropy=np.full(4, np.nan)).measure().metrics()
    history = clean()
    history[39] |= {"optim/grad_norm": math.nan, "optim/nonfinite_gradients": 1.0}
    history[40] |= spoiled
    found = diagnose(history, [])
    assert found.cause is EndCause.NONFINITE_GRADIENT
    assert "the gradient of step 39 was not finite" in found.sentence
    history[39], history[38] = clean()[39], history[39]
    assert diagnose(history, []).cause is EndCause.MISSING_LOGPROBS, "step 39 was sound, so the update was left out"
