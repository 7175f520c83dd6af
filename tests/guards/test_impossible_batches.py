"""What the public API says to batches that cannot be right: masks, empty ones, entropies and sides in bits."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mismatch_probe as mp
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.guards import Guards
from tests.guards.steps import RESPONSES, batch, fired

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off", "ignore:step 2 lacks")

SOUND = batch(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["measure", "compare"])
def test_an_array_of_several_rows_needs_a_mask_or_the_word_that_all_is_full(name: str) -> None:
    log_mu = -np.random.default_rng(1).exponential(1, (8, 30))
    log_pi = log_mu - 0.01 * np.random.default_rng(2).random((8, 30))

    def take(*sides: Any, mask: Any = None) -> object:
        if name == "measure":
            return mp.Batch(*sides, mask).measure()
        return mp.compare_logprobs(*sides, mask).to_dict()

    with pytest.raises(UsageError, match="log_pi is a 2-D array without a mask, so padding would count"):
        take(log_pi, log_mu)
    with pytest.raises(UsageError, match="mask is no list of responses"):
        take(log_pi, log_mu, mask=False)
    full = take(log_pi, log_mu, mask=True)
    assert full == take(log_pi, log_mu, mask=np.ones((8, 30))) == take(list(log_pi), list(log_mu))
    assert full == take(np.ma.masked_array(log_pi), log_mu) == take(log_pi, np.ma.masked_array(log_mu))
    assert take(log_pi[:1], log_mu[:1]) == take(log_pi[0], log_mu[0])


def test_a_batch_that_holds_nothing_is_refused() -> None:
    guards = Guards.default()
    for empty in (mp.Batch([], []), mp.Sums(), mp.Batch(np.zeros((0, 5)), np.zeros((0, 5)))):
        with pytest.raises(UsageError, match="the batch holds no response"):
            guards.observe(empty)
    with pytest.raises(UsageError, match="the first batch holds no token that counts"):
        guards.observe(replace(SOUND, mask=np.zeros((RESPONSES, 40))))
    assert not guards.observe(SOUND).events
    assert fired(guards.observe(replace(SOUND, mask=np.zeros((RESPONSES, 40)))).events) == {"no-tokens"}


@pytest.mark.parametrize("blank", [0.0, math.nan, -9999.0])
@pytest.mark.parametrize("name", ["log_pi", "log_mu"])
def test_an_inverted_mask_is_refused_and_the_right_one_is_taken(name: str, blank: float) -> None:
    mask = np.asarray(SOUND.mask)
    blanked = {name: np.where(mask, np.asarray(getattr(SOUND, name)), blank)}
    with pytest.raises(UsageError, match="mask is inverted: the tokens that it keeps have no log-prob in"):
        replace(SOUND, mask=~mask, **blanked).measure()
    assert replace(SOUND, **blanked).measure() == SOUND.measure()


def test_a_mask_that_is_inverted_in_many_rows_is_warned_of() -> None:
    mask = np.array(SOUND.mask)
    padded = np.flatnonzero(~mask.all(1))
    some = padded[: len(padded) // 2]
    mask[some] = ~mask[some]
    with pytest.warns(UserWarning, match="mask looks inverted in many of the responses"):
        replace(SOUND, mask=mask).measure()


@pytest.mark.parametrize("log_mu", [np.zeros((RESPONSES, 40)), np.full((RESPONSES, 40), np.nan)])
def test_log_probs_that_were_not_recorded_are_no_inverted_mask(log_mu: Any) -> None:
    assert replace(SOUND, log_mu=log_mu).measure().left_out.out > 0


def test_a_few_certain_answers_after_prompts_with_log_probs_are_no_inverted_mask() -> None:
    """A prompt's tokens have log-probs of both sides, and each answer is one token that is certain."""
    sides = -np.random.default_rng(1).exponential(1, (8, 20))
    sides[:, -1] = 0.0
    mp.Batch(sides, sides, np.arange(20) == np.full((8, 1), 19)).measure()


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("seed", range(6))
def test_entropies_in_another_base_are_warned_of_and_those_in_nats_are_not(seed: int, base: int) -> None:
    rows = [batch(7 * seed + step) for step in range(4)]
    arrays = {
        name: np.concatenate([getattr(row, name) for row in rows]) for name in ("log_pi", "log_mu", "mask", "entropy")
    }
    mp.Batch(**arrays).measure()
    with pytest.warns(UserWarning, match=f"entropy looks like logarithms to base {base}"):
        in_base = mp.Batch(**{**arrays, "entropy": arrays["entropy"] / math.log(base)}).measure()
    without = mp.Batch(**{name: values for name, values in arrays.items() if name != "entropy"}).measure()
    np.testing.assert_equal(in_base.metrics(), without.metrics())


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(["log_pi"], "log_pi looks like"), (["log_mu"], "log_mu looks like"), (["log_pi", "log_mu"], "log_pi and log_mu")],
)
def test_sides_in_bits_are_warned_of(names: list[str], sentence: str) -> None:
    rows = [batch(step) for step in range(4)]
    arrays = {
        name: np.concatenate([getattr(row, name) for row in rows]) for name in ("log_pi", "log_mu", "mask", "entropy")
    }
    with pytest.warns(UserWarning, match=sentence):
        mp.Batch(**{**arrays, **{name: arrays[name] / math.log(2) for name in names}}).measure()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_a_lower_temperature_of_sampling_is_not_taken_for_bits(temperature: float) -> None:
    rows = [batch(step, temperature=temperature) for step in range(40)]
    arrays = {
        name: np.concatenate([getattr(row, name) for row in rows]) for name in ("log_pi", "log_mu", "mask", "entropy")
    }
    mp.Batch(**arrays).measure()
