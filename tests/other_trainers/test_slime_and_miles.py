"""The functions that slime and miles call by their paths, on rollouts as they hand them over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mismatch_probe.adapters import miles, slime  # noqa: E402
from mismatch_probe.errors import TrainingStopped  # noqa: E402
from tests.guards.steps import RESPONSES, batch  # noqa: E402
from tests.warm_python import warm_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off")

SLIME_ARGS = SimpleNamespace(n_samples_per_prompt=4)
MILES_ARGS = SimpleNamespace(tis_clip_low=0.0, tis_clip=2.0)


@pytest.fixture(autouse=True)
def _new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of one rank, whatever tests before it left."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.delenv(slime.GUARDS_FILE, raising=False)
    slime.guards.cache_clear()
    monkeypatch.setattr(miles, "_ROLLOUT", miles._Rollout())


def rollout(step: int, **changed: Any) -> dict[str, Any]:
    """As slime has it: a list of 1-D tensors a column, rewards of the whole rollout."""
    complete_batch = batch(step, **changed)
    mask = np.asarray(complete_batch.mask)

    def rows(values: Any) -> list[Any]:
        return [torch.tensor(row[kept], dtype=torch.float32) for row, kept in zip(values, mask, strict=True)]

    return {
        "log_probs": rows(complete_batch.log_pi),
        "rollout_log_probs": rows(complete_batch.log_mu),
        "loss_masks": [torch.ones(int(kept.sum())) for kept in mask],
        "raw_reward": list(complete_batch.rewards),
        "truncated": [int(cut) for cut in complete_batch.truncated],
    }


@pytest.mark.slow
def test_slime_trains_on_what_is_sound_and_on_nothing_of_what_is_not() -> None:
    for step in range(4):
        data = rollout(step)
        slime.guard_rollout(SLIME_ARGS, step, data)
        assert all(mask.all() for mask in data["loss_masks"])
    for step in (4, 5, 6, 7):
        data = rollout(step, rewards=[float("nan")] * RESPONSES)
        slime.guard_rollout(SLIME_ARGS, step, data)
        assert not any(mask.any() for mask in data["loss_masks"])
    with pytest.raises(TrainingStopped, match="reward"):
        slime.guard_rollout(SLIME_ARGS, 8, rollout(8, rewards=[float("nan")] * RESPONSES))


def test_a_reward_that_is_no_number_is_withheld_in_slime() -> None:
    data = rollout(0)
    data["raw_reward"][0] = "good"
    slime.guard_rollout(SLIME_ARGS, 0, data)
    assert not any(mask.any() for mask in data["loss_masks"])


def fired_in_slime(steps: int, caplog: pytest.LogCaptureFixture, **changed: Any) -> list[str]:
    for step in range(steps):
        slime.guard_rollout(SLIME_ARGS, step, rollout(step, **changed))
    return [record.message for record in caplog.records]


@pytest.mark.slow
def test_a_clean_run_in_slime_warns_of_nothing_and_constant_rewards_do(caplog: pytest.LogCaptureFixture) -> None:
    assert fired_in_slime(40, caplog) == []
    assert {"constant-reward", "reward-range"}.isdisjoint(slime.guards().off)
    slime.guards.cache_clear()
    assert "constant-reward" in "".join(fired_in_slime(16, caplog, rewards=[1.0] * RESPONSES))


@pytest.mark.slow
def test_in_slime_the_rewards_of_responses_that_were_cut_count_for_no_range(caplog: pytest.LogCaptureFixture) -> None:
    """All but one earn nothing, and that one was cut; the rollout lies in another order than the responses."""
    partition = list(reversed(range(RESPONSES)))
    for step in range(16):
        data = rollout(step, rewards=[1.0] + [0.0] * (RESPONSES - 1)) | {"partition": partition}
        data["truncated"] = [0] * (RESPONSES - 1) + [1]
        slime.guard_rollout(SLIME_ARGS, step, data)
    assert "constant-reward" in caplog.text


def test_where_slime_does_not_tell_which_responses_were_cut_all_count() -> None:
    data = rollout(0, rewards=[1.0] + [0.0] * (RESPONSES - 1))
    del data["truncated"]
    slime.guard_rollout(SLIME_ARGS, 0, data)
    assert slime.guards().state_dict()["history"][0][1]["reward/whole_range"] == 1.0


@pytest.mark.slow
def test_a_clean_run_in_miles_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for step in range(40):
        miles.decide(MILES_ARGS)
        micro_batch(rollout(step))
    assert not caplog.records


def without_tokens(step: int) -> dict[str, Any]:
    data = rollout(step)
    return data | {"loss_masks": [torch.zeros_like(mask) for mask in data["loss_masks"]]}


def test_loss_masks_that_are_all_zero_end_a_run_in_slime_and_name_the_mask() -> None:
    for step in range(4):
        slime.guard_rollout(SLIME_ARGS, step, rollout(step))
    for step in range(4, 8):
        slime.guard_rollout(SLIME_ARGS, step, without_tokens(step))
    with pytest.raises(TrainingStopped, match="No token counts: in the last 5 steps the mask left none"):
        slime.guard_rollout(SLIME_ARGS, 8, without_tokens(8))


def test_loss_masks_that_are_all_zero_end_a_run_in_miles_and_name_the_mask() -> None:
    for step in range(9):
        miles.decide(MILES_ARGS)
        micro_batch(rollout(step) if step < 4 else without_tokens(step))
    with pytest.raises(TrainingStopped, match="No token counts: in the last 5 steps the mask left none"):
        miles.decide(MILES_ARGS)


def test_a_rollout_that_comes_again_for_ever_is_named_in_slime_and_in_miles(caplog: pytest.LogCaptureFixture) -> None:
    for step in range(3):
        slime.guard_rollout(SLIME_ARGS, step, rollout(1))
    assert "repeated-batch" in caplog.text
    caplog.clear()
    slime.guards.cache_clear()
    for _ in range(4):
        miles.decide(MILES_ARGS)
        micro_batch(rollout(1))
    assert "repeated-batch" in caplog.text


def test_slime_without_the_trainer_s_log_probs_still_sees_the_rewards() -> None:
    data = rollout(0)
    del data["log_probs"]
    slime.guard_rollout(SLIME_ARGS, 0, data)
    on = {guard.name for guard in slime.guards().explain() if guard.is_on}
    assert "reward-nonfinite" in on
    assert "mismatch-limit" not in on


def test_miles_corrects_as_its_own_function_does_and_sees_both_sides() -> None:
    data = rollout(1)
    loss, masks, metrics = micro_batch(data)
    ratio = torch.exp(torch.cat(data["log_probs"]) - torch.cat(data["rollout_log_probs"]))
    assert torch.allclose(loss, ratio.clamp(0.0, 2.0))
    assert masks is data["loss_masks"]
    assert set(metrics) == {"tis", "tis_clipfrac", "tis_abs"}
    miles.decide(MILES_ARGS)
    assert slime.guards().explain().guards[0].is_on is not None


def test_miles_skips_a_rollout_after_a_fault_of_two_rollouts_and_ends_a_run_that_stays_ill() -> None:
    """The mismatch is too large from rollout 2 on; miles shows each one when the next begins."""
    messages = []
    for step in range(10):
        try:
            miles.decide(MILES_ARGS)
        except TrainingStopped:
            messages.append("stopped")
            break
        loss, masks, _ = micro_batch(rollout(step, noise=0.6 if step >= 2 else 0.01))
        masked = not any(mask.any() for mask in masks)
        assert masked == (not loss.any())
        messages.append("skipped" if masked else "learnt")
    assert messages == ["learnt", "learnt", "learnt", "learnt", "skipped", "learnt", "skipped", "learnt", "stopped"]


def micro_batch(data: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    num_tokens = sum(len(row) for row in data["log_probs"])
    return miles.truncate(
        MILES_ARGS,
        pg_loss=torch.ones(num_tokens),
        train_log_probs=data["log_probs"],
        rollout_log_probs=data["rollout_log_probs"],
        loss_masks=data["loss_masks"],
        total_lengths=[],
        response_lengths=[],
        parallel_state=None,
    )


@pytest.mark.slow
def test_a_guards_file_that_one_rank_cannot_read_ends_all_of_them(tmp_path: Path) -> None:
    first, second = warm_ranks(2, "tests.other_trainers.slime_on_ranks", tmp_path)
    assert first.stdout == second.stdout
    assert "guards-0.toml" in first.stdout
