"""A batch of arrays: what is summed over it, on one rank or on several, and what is refused in a sentence."""

from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.sums import Sums
from tests.guards.steps import RESPONSES, batch

FLAGS = ("in_part", "computed_apart")


def test_ranks_that_add_up_their_sums_decide_as_one() -> None:
    complete_batch = batch(3, temperature=0.7)
    rows = []
    for rank in range(4):
        mine = slice(4 * rank, 4 * rank + 4)
        parts = {name: np.asarray(given)[mine] for name, given in vars(complete_batch).items() if name not in FLAGS}
        rows.append(Batch(**parts).measure().to_array())
    together, alone = Sums.of_arrays(rows).metrics(), complete_batch.measure().metrics()
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        tolerance = 0.03 if name == "mismatch/temperature_fit" else 1e-9
        assert together[name] == pytest.approx(value, rel=tolerance, nan_ok=True), name


def test_a_rank_without_responses_changes_nothing() -> None:
    complete_batch = batch(3).measure()
    nothing = Batch(np.zeros((0, 40)), np.zeros((0, 40)), np.zeros((0, 40))).measure()
    assert (complete_batch + nothing).metrics() == pytest.approx(complete_batch.metrics())
    assert nothing.metrics() == {}


def test_a_batch_without_the_sampler_still_has_rewards_and_lengths() -> None:
    metrics = batch(1, log_mu=None).measure().metrics()
    assert {name.split("/")[0] for name in metrics} == {"reward", "response"}
    assert metrics["response/length_mean"] == batch(1).measure().metrics()["response/length_mean"]
    with pytest.raises(UsageError, match="says nothing of its tokens"):
        Batch(rewards=[1.0]).measure()


def test_a_column_of_values_and_prompts_of_chat_messages_say_the_same() -> None:
    complete_batch = batch(1)
    columns = {
        "rewards": np.asarray(complete_batch.rewards)[:, None],
        "truncated": np.asarray(complete_batch.truncated)[:, None].astype(np.int64),
        "prompt_ids": [[{"role": "user", "content": f"task {prompt}"}] for prompt in complete_batch.prompt_ids],
    }
    assert batch(1, **columns).measure() == complete_batch.measure()


@pytest.mark.parametrize("absent", ["good", None])
def test_one_reward_that_is_no_number_is_counted_as_one(absent: object) -> None:
    rewards = [absent, *(np.float32(number) for number in range(RESPONSES - 1))]
    assert batch(1, rewards=rewards).measure().metrics()["reward/nonfinite"] == 1


def test_what_a_masked_array_hides_is_in_no_sum() -> None:
    given = batch(1)
    mask = np.asarray(given.mask)
    names = ("log_pi", "log_mu", "entropy")
    hidden = {name: np.ma.masked_array(np.where(mask, getattr(given, name), 50.0), ~mask) for name in names}
    assert batch(1, mask=None, **hidden).measure() == given.measure()
    rewards = np.ma.masked_array(np.ones(RESPONSES), [True] + [False] * (RESPONSES - 1))
    assert batch(1, rewards=rewards).measure().metrics()["reward/nonfinite"] == 1


@pytest.mark.parametrize("absent", [np.nan, None, {"id": 1}])
def test_what_tells_no_prompt_is_refused(absent: Any) -> None:
    with pytest.raises(UsageError, match="names no prompt"):
        batch(1, prompt_ids=[absent, *range(RESPONSES - 1)]).measure()


@pytest.mark.parametrize("name", ["log_pi", "log_mu", "entropy"])
def test_complex_numbers_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} holds complex numbers"):
        batch(1, **{name: np.asarray(getattr(batch(1), name)) + 0j}).measure()


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(UsageError, match="log_pi holds a number too large for a float"):
        Batch([[-1.0, -(10**400)]], [[-1.0, -1.0]]).measure()


def test_a_rank_with_empty_lists_adds_nothing() -> None:
    assert Batch([], [], [], entropy=[], prompt_ids=[], rewards=[], truncated=[]).measure() == Sums()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"log_mu": np.zeros((RESPONSES, 41))}, "log_mu is 16 x 41 and log_pi is 16 x 40"),
        ({"rewards": [1.0]}, "rewards has 1 values for 16 responses"),
        ({"prompt_ids": [[1, 2]] * 3}, "prompt_ids has 3 values for 16 responses"),
        ({"mask": np.full((RESPONSES, 40), 0.5)}, "mask holds something besides 0 and 1"),
        ({"log_pi": np.full((RESPONSES, 40), 0.5)}, "log_pi lies between 0 and 1, as probabilities do"),
        ({"log_mu": [["a"] * 40] * RESPONSES}, "log_mu holds something that is no number"),
        ({"rewards": np.zeros((RESPONSES, 3))}, "rewards has 48 values for 16 responses"),
        ({"truncated": ["stop"] * RESPONSES}, "truncated holds something besides true and false"),
        ({"truncated": [None] * RESPONSES}, "truncated holds something besides true and false"),
    ],
)
def test_arrays_that_do_not_fit_are_one_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        batch(1, **given).measure()
