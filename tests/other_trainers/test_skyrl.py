"""SkyRL's callback on batches as its trainer hands them over; its base class is SkyRL's own where that is installed."""

import sys
from collections import deque
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mismatch_probe.errors import TrainingStopped  # noqa: E402
from tests.guards.steps import RESPONSES, TOKENS  # noqa: E402
from tests.other_trainers.batches import columns  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off")

STATUS = {"policy_loss": 0.1, "grad_norm": 0.5, "policy_lr": 1e-6}


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Any:
    if find_spec("skyrl") is None:
        for name in ("skyrl", "skyrl.train", "skyrl.train.utils", "skyrl.train.utils.callbacks"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["skyrl.train.utils.callbacks"].TrainingCallback = object  # type: ignore[attr-defined]
        monkeypatch.delitem(sys.modules, "mismatch_probe.adapters.skyrl", raising=False)
    from mismatch_probe.adapters.skyrl import GuardCallback

    return GuardCallback()


def ended(step: int, **changed: Any) -> Any:
    """What `on_step_end` is given."""
    given = columns(step, **changed)
    batch = {
        "action_log_probs": given["old_log_probs"],
        "rollout_logprobs": given["rollout_log_probs"],
        "loss_mask": given["response_mask"],
    }
    return SimpleNamespace(batch=batch, metrics=dict(STATUS), global_step=step, logs=None)


@pytest.mark.slow
def test_a_clean_run_goes_on_and_its_metrics_join_the_log(callback: Any, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 41):
        callback.on_step_end(None, ended(step), None)
    assert not caplog.records
    logs = {"reward/avg_raw_reward": 0.5}
    callback.on_log(None, SimpleNamespace(logs=logs), None)
    assert logs["guards/mismatch/kl_k3"] > 0
    assert logs["guards/optim/learning_rate"] == STATUS["policy_lr"]


def test_a_run_that_stays_ill_is_ended(callback: Any) -> None:
    for step in range(1, 4):
        callback.on_step_end(None, ended(step), None)
    ill = (ended(step, noise=1.0) for step in range(4, 12))
    with pytest.raises(TrainingStopped):
        deque(callback.on_step_end(None, step, None) for step in ill)
    assert callback.guards.state_dict()["last_step"] < 11


def test_the_norm_that_deepspeed_writes_for_none_is_absent(callback: Any) -> None:
    callback.on_step_end(None, ended(1), None)
    overflowed = ended(2)
    overflowed.metrics["grad_norm"] = -1.0
    with pytest.warns(UserWarning, match="step 2 lacks grad_norm"):
        callback.on_step_end(None, overflowed, None)


def test_a_mask_that_is_all_zero_ends_the_run_and_is_named(callback: Any) -> None:
    for step in range(1, 4):
        callback.on_step_end(None, ended(step), None)
    empty = (ended(step, mask=np.zeros((RESPONSES, TOKENS))) for step in range(4, 12))
    with pytest.raises(TrainingStopped, match="No token counts: in the last 5 steps the mask left none"):
        deque(callback.on_step_end(None, step, None) for step in empty)


def test_a_batch_that_comes_again_for_ever_ends_the_run_and_is_named(callback: Any) -> None:
    same = (SimpleNamespace(**{**vars(ended(1)), "global_step": step}) for step in range(1, 13))
    with pytest.raises(TrainingStopped, match="The same responses come again: in each of the last 11 steps"):
        deque(callback.on_step_end(None, step, None) for step in same)


def test_a_step_whose_forward_pass_skyrl_left_out_has_no_log_probs_of_pi(callback: Any) -> None:
    given = ended(1)
    given.batch["action_log_probs"] = None
    callback.on_step_end(None, given, None)
    assert "mismatch-limit" in callback.guards.off
