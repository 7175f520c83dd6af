"""A side that is a copy of the other is no measurement: it is named, and no guard takes it for a mismatch of 0."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.api.compare_logprobs import compare_logprobs
from mismatch_probe.causes.training import EndCause
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.sums import Sums
from tests.guards.steps import LEARNT, batch, fired

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off")


def copied(step: int, *, but_first: bool = True, **others: Any) -> Batch:
    """pi's log-probs are mu's, or all but the first of each response."""
    given = batch(step)
    log_pi = np.array(given.log_mu)
    if but_first:
        log_pi[:, 0] = np.asarray(given.log_pi)[:, 0]
    return batch(step, log_pi=log_pi, **others)


@pytest.mark.parametrize("but_first", [False, True])
def test_a_copied_side_is_named_and_its_mismatch_is_not_measured(but_first: bool) -> None:
    guards = Guards.default(can={"skip", "stop"})
    guards.observe(batch(1), **LEARNT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decision = guards.observe(copied(2, but_first=but_first), **LEARNT)
    assert fired(decision.events) == {"copied-side"}
    assert not decision.skip
    assert "mismatch/kl_k3" not in decision.metrics
    assert decision.metrics["mismatch/copied_share"] == pytest.approx(0.97, abs=0.031)
    assert decision.metrics["policy/entropy"] > 0
    assert decision.diagnosis is not None
    assert decision.diagnosis.cause is EndCause.COPIED_SIDE
    assert "so no mismatch was measured" in decision.diagnosis.sentence


def test_what_stops_a_run_is_named_and_not_a_copy_beside_it() -> None:
    guards = Guards.default(can={"skip", "stop"})
    guards.observe(batch(1), **LEARNT)
    decision = guards.observe(copied(2, rewards=np.full(16, math.nan)), **LEARNT)
    assert {"copied-side", "reward-nonfinite"} <= fired(decision.events)
    assert decision.diagnosis is not None
    assert decision.diagnosis.cause is EndCause.REWARD_NAN


def test_a_first_step_that_is_a_copy_leaves_guards_on_for_those_that_are_none() -> None:
    guards, usual = Guards.default(can={"skip", "stop"}), Guards.default(can={"skip", "stop"})
    usual.observe(batch(1), **LEARNT)
    assert fired(guards.observe(copied(1), **LEARNT).events) == {"copied-side"}
    assert guards.off == usual.off
    for step in range(2, 8):
        assert not guards.observe(batch(step), **LEARNT).events
    far = [guards.observe(batch(step, temperature=0.7), **LEARNT) for step in range(8, 10)]
    assert {"mismatch-limit", "temperature"} <= fired(far[-1].events)


@pytest.mark.slow
def test_sides_that_were_computed_apart_may_be_equal() -> None:
    guards = Guards.default(can={"skip", "stop"})
    for step in range(1, 13):
        decision = guards.observe(copied(step, but_first=False, computed_apart=True), **LEARNT)
        assert (decision.events, decision.metrics["mismatch/kl_k3"]) == ((), 0.0)
    with pytest.raises(UsageError, match="computed_apart is 'yes': give True"):
        batch(1, computed_apart="yes").measure()
    with pytest.raises(UsageError, match=r"in_part is array\(\[1., 2.\]\): give True where tokens may lack"):
        batch(1, in_part=np.array([1.0, 2.0])).measure()


def test_ranks_that_hold_copies_add_up_to_one() -> None:
    given = copied(3)
    arrays = {name: np.asarray(getattr(given, name)) for name in ("log_pi", "log_mu", "mask")}
    parts = [{name: values[rank::4] for name, values in arrays.items()} for rank in range(4)]
    together = Sums.of_arrays([Batch(**part).measure().to_array() for part in parts])
    assert together.is_copied
    assert together.metrics()["mismatch/copied_share"] == given.measure().metrics()["mismatch/copied_share"]


@pytest.mark.parametrize("noise", [1e-2, 1e-3, 3e-7])
def test_sides_that_differ_by_rounding_are_none(noise: float) -> None:
    """At 3e-7 both are FP32: many tokens are equal to the last bit."""
    given = batch(1, noise=noise)
    log_pi, log_mu = (np.asarray(side, dtype=np.float32) for side in (given.log_pi, given.log_mu))
    sums = batch(1, log_pi=log_pi, log_mu=log_mu).measure()
    assert not sums.is_copied
    assert sums.metrics()["mismatch/copied_share"] == 0
    assert noise > 1e-6 or sums.copies.share > 0.05


def test_a_fault_in_a_copy_is_a_fault() -> None:
    given = copied(2)
    spoiled = np.array(given.log_pi)
    spoiled[0, 1] = math.inf
    assert math.isnan(batch(2, log_pi=spoiled, log_mu=given.log_mu).measure().metrics()["mismatch/kl_k3"])


def copied_in(rows: Any, step: int, *, temperature: float = 1.0, but_first: bool = False) -> Batch:
    """pi's log-probs are mu's in these responses, but for the first token."""
    given = batch(step, temperature=temperature)
    log_pi = np.array(given.log_pi)
    log_pi[rows, int(but_first) :] = np.asarray(given.log_mu)[rows, int(but_first) :]
    return batch(step, temperature=temperature, log_pi=log_pi)


@pytest.mark.parametrize("but_first", [False, True])
@pytest.mark.parametrize("rows", [slice(2), slice(12)])
def test_responses_that_are_copied_are_named_beside_the_others(rows: slice, but_first: bool) -> None:
    guards = Guards.default(can={"skip", "stop"})
    guards.observe(batch(1), **LEARNT)
    decision = guards.observe(copied_in(rows, 2, but_first=but_first), **LEARNT)
    assert fired(decision.events) == {"copied-rows"}
    assert decision.metrics["mismatch/copied_rows_share"] >= rows.stop / 16 - 0.26
    assert decision.metrics["mismatch/kl_k3"] > 0
    assert decision.diagnosis is not None
    assert decision.diagnosis.cause is EndCause.COPIED_SIDE
    assert "of the responses one side's log-probs are copied" in decision.diagnosis.sentence


def test_a_rank_whose_responses_are_all_copied_is_seen_beside_the_others() -> None:
    ranks = [batch(1).measure(), copied(2).measure(), batch(3).measure(), batch(4).measure()]
    metrics = Sums.of_arrays([rank.to_array() for rank in ranks]).metrics()
    assert metrics["mismatch/copied_rows_share"] == pytest.approx(0.2, abs=0.051)
    assert metrics["mismatch/copied_share"] == 0


@pytest.mark.parametrize("digits", [1, 2, 3, None])
def test_no_response_of_a_sound_batch_is_a_copy(digits: int | None) -> None:
    for step in range(1, 30):
        given = batch(step, noise=0.01)
        sides = {name: np.asarray(getattr(given, name)) for name in ("log_pi", "log_mu")}
        if digits is not None:
            sides = {name: np.round(side, digits) for name, side in sides.items()}
        assert batch(step, noise=0.01, **sides).measure().metrics()["mismatch/copied_rows_share"] == 0


def test_sides_that_were_computed_apart_may_be_equal_in_any_response() -> None:
    guards = Guards.default(can={"skip", "stop"})
    given = replace(copied_in(slice(12), 1), computed_apart=True)
    assert not guards.observe(given, **LEARNT).events


def test_responses_that_are_copied_do_not_dilute_a_comparison() -> None:
    given = copied_in(slice(12), 2, temperature=1.2)
    others = {name: np.asarray(getattr(given, name))[12:] for name in ("log_pi", "log_mu", "mask")}
    with pytest.warns(
        UserWarning, match=r"in (8|9|1\d) of 16 responses: these are left out, as copies( \(\d others|;)"
    ):
        part = compare_logprobs(given.log_pi, given.log_mu, given.mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = compare_logprobs(**others)
        compare_logprobs(given.log_pi, given.log_mu, given.mask, computed_apart=True)
        compare_logprobs(batch(3).log_pi, batch(3).log_mu, batch(3).mask)
    assert part.metrics["kl_k3"].value == pytest.approx(expected.metrics["kl_k3"].value, rel=0.5)


def short_batch(share: float, decimals: int | None = None, tokens: int = 6, seed: int = 0) -> Batch:
    """128 responses of so many tokens, with a share of copies."""
    random = np.random.default_rng(seed)
    log_mu = -random.exponential(1.0, (128, tokens))
    log_pi = np.minimum(log_mu + random.normal(0, 0.01, log_mu.shape) * -np.expm1(log_mu), 0)
    log_pi[: int(128 * share)] = log_mu[: int(128 * share)]
    sides = (side if decimals is None else side.round(decimals) for side in (log_pi, log_mu))
    return Batch(*sides, mask=True)


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_copies_among_short_responses_are_named_together_over_ranks(share: float) -> None:
    given = short_batch(share)
    log_pi, log_mu = np.asarray(given.log_pi), np.asarray(given.log_mu)
    ranks = [Batch(log_pi[rank::16], log_mu[rank::16], mask=True).measure() for rank in range(16)]
    assert not any(rank.metrics()["mismatch/copied_rows_share"] for rank in ranks)
    together = Sums.of_arrays([rank.to_array() for rank in ranks])
    assert together.metrics()["mismatch/copied_rows_share"] == pytest.approx(share, abs=0.01)
    assert together.metrics() == pytest.approx(given.measure().metrics())
    with pytest.warns(UserWarning, match=rf"in {int(128 * share)} of 128 responses: these are left out"):
        compare_logprobs(log_pi, log_mu, True)


@pytest.mark.parametrize("decimals", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_short_responses_that_rounding_makes_equal_are_no_copies(tokens: int, decimals: int | None) -> None:
    metrics = short_batch(0.0, decimals, tokens).measure().metrics()
    assert (metrics["mismatch/copied_rows_share"], metrics["mismatch/copied_share"]) == (0, 0)


def test_answers_of_one_nearly_sure_token_are_equal_by_two_decimals_and_no_copies() -> None:
    """A choice of two at 0.98: in two decimals both sides are -0.02, as they are where each was computed."""
    random = np.random.default_rng(0)
    log_mu = np.full((32, 1), math.log(0.98))
    log_pi = log_mu + random.normal(0, 0.01, log_mu.shape) * -np.expm1(log_mu)
    sums = Batch(log_pi.round(2), log_mu.round(2), mask=True).measure()
    assert not sums.is_copied
    assert "mismatch/kl_k3" in sums.metrics()
