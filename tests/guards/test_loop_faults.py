"""Faults in somebody's own loop: decided on before the update, named, and answered by what the loop can do."""

import warnings

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.guards import Guards
from tests.guards.steps import LEARNT, RESPONSES, batch, fired


@pytest.mark.parametrize(
    ("changed", "guard", "action"),
    [
        ({"temperature": 0.7}, "temperature", "skip"),
        ({"rewards": np.array([1.0, np.nan] * (RESPONSES // 2))}, "reward-nonfinite", "skip"),
        ({"rewards": ["1.0", "high"] * (RESPONSES // 2)}, "reward-nonfinite", "skip"),
        ({"rewards": [None, 1.0] * (RESPONSES // 2)}, "reward-nonfinite", "skip"),
        ({"log_mu": np.zeros((RESPONSES, 40))}, "mismatch-nonfinite", "skip"),
        ({"noise": 0.6}, "mismatch-limit", "skip"),
    ],
    ids=["temperature", "NaN reward", "text as reward", "no reward", "no log-probs", "other weights"],
)
def test_a_fault_is_decided_on_before_the_update(changed: dict[str, object], guard: str, action: str) -> None:
    guards = Guards.default(can={"skip", "stop"})
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 4):
            assert not guards.observe(batch(step), **LEARNT).skip
        for step in range(4, 6):
            decision = guards.observe(batch(step, **changed), **LEARNT)
            seen += [guard] if guard in fired(decision.events) and getattr(decision, action) else []
    assert seen
    assert decision.diagnosis is not None
    assert guard in str(decision)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:guards that are off")
@pytest.mark.parametrize("onset", [1, 5])
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_one_gradient_that_is_not_finite_is_named_and_its_update_withheld(norm: float, onset: int) -> None:
    guards = Guards.default(can={"skip", "stop"})
    for step in range(1, onset + 20):
        decision = guards.observe(batch(step), **{**LEARNT, "grad_norm": norm if step == onset else 0.5})
        assert fired(decision.events) == ({"gradient-nonfinite"} if step == onset else set())
        assert decision.skip == (step == onset)
        if step == onset:
            assert decision.diagnosis is not None
            assert decision.diagnosis.cause is EndCause.NONFINITE_GRADIENT
            assert "the gradient norm is" in str(decision.diagnosis)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_gradients_that_stay_not_finite_end_the_run() -> None:
    guards = Guards.default(can={"skip", "stop"})
    decisions = [guards.observe(batch(step), **{**LEARNT, "grad_norm": float("nan")}) for step in range(1, 6)]
    assert all(decision.skip for decision in decisions)
    assert [decision.stop for decision in decisions] == [False] * 4 + [True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_scaler_leaves_one_overflow_out_and_several_in_a_row_are_a_fault() -> None:
    guards = Guards.default(can={"skip", "stop"})

    def step(number: int, norm: float, scale: float) -> set[str]:
        return fired(guards.observe(batch(number), loss=0.3, grad_norm=norm, loss_scale=scale).events)

    assert step(1, float("inf"), 2048.0) == set()
    assert all(step(number, 0.5, 1024.0) == set() for number in range(2, 6))
    assert step(6, float("inf"), 2048.0) == set()
    seen = [step(number, float("inf"), 2048.0 / 2**number) for number in range(7, 22)]
    assert all("overflow" in guards_of_step for guards_of_step in seen)
    assert "overflow-dead" in seen[-1]
    assert not any("gradient-nonfinite" in guards_of_step for guards_of_step in seen)
    assert guards.diagnosis().cause is EndCause.FP16_DEAD


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_later_update_of_a_step_is_judged_by_its_own_gradient() -> None:
    guards = Guards.default(can={"skip", "stop"})
    with pytest.raises(UsageError, match="call observe first"):
        guards.observe_update(grad_norm=0.5)
    assert not guards.observe(batch(1), **LEARNT).events
    assert not guards.observe_update(**LEARNT).events
    later = guards.observe_update(**{**LEARNT, "grad_norm": float("nan")})
    assert (fired(later.events), later.skip, later.step) == ({"gradient-nonfinite"}, True, 1)
    assert later.diagnosis is not None
    assert later.diagnosis.cause is EndCause.NONFINITE_GRADIENT


def test_what_the_loop_cannot_do_is_named() -> None:
    guards = Guards.default()
    with pytest.warns(UserWarning, match="guards that are off"):
        decision = guards.observe(batch(1, rewards=[np.nan] * RESPONSES))
    assert not decision.skip
    assert decision.gives_up
    assert [str(action) for action in decision.unsupported] == ["leave_out"]
    assert "not possible here: leave_out" in str(decision)


def test_a_reward_whose_square_is_too_large_is_seen_and_breaks_nothing() -> None:
    guards = Guards.default(can={"skip"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(1, 13):
            guards.observe(batch(step))
        decision = guards.observe(batch(13, rewards=np.linspace(1e300, 2e300, RESPONSES)))
    assert "reward-scale" in fired(decision.events)
    assert decision.skip
