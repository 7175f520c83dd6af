"""Faults planted in a copy of a user's batch: which guards would have fired."""

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.guards import Guards
from tests.guards.steps import RESPONSES, batch

GUARDS = Guards.default(can={"skip", "stop"})


@pytest.mark.slow
def test_every_fault_is_seen() -> None:
    given = batch(1)
    before = np.array(given.log_mu)
    tested = GUARDS.self_test(given)
    assert tested.as_given == ()
    seen = {row.fault: row for row in tested}
    assert tested.unseen == ()
    assert "temperature" in seen["log-probs of mu at temperature 0.7"].guards
    assert seen["one in 10 log-probs of mu is NaN"].guards[0] == "mismatch-nonfinite"
    assert (seen["labels shifted by one token"].withheld_at, seen["one reward is NaN"].withheld_at) == (2, 1)
    assert seen["one reward is NaN"].stopped_at == 5
    for copied in ("log-probs of mu copied from pi's", "log-probs of mu copied but for each first token"):
        assert (seen[copied].guards, seen[copied].seen_at, seen[copied].stopped_at) == (("copied-side",), 1, None)
    assert seen["rewards times 1e+06"].guards[0] == "reward-scale"
    assert seen["a mask that leaves no token"].guards == ("no-tokens",)
    assert np.array_equal(given.log_mu, before)
    assert {guard.state for guard in GUARDS.explain()} == {"known at the first step"}


@pytest.mark.slow
def test_guards_that_are_off_see_nothing() -> None:
    tested = GUARDS.self_test(batch(1, entropy=None, rewards=None))
    assert not any("temperature" in row.guards or "reward" in row.fault for row in tested)


def test_of_a_batch_that_is_broken_nothing_is_claimed_but_what_breaks_it() -> None:
    tested = GUARDS.self_test(batch(1, temperature=0.7))
    assert str(tested).startswith(
        "the batch is broken as it is: mismatch-limit, sampling, temperature would fire on it"
    )
    assert "none" not in str(tested)
    assert {"mismatch-limit", "temperature"} <= set(tested.as_given)
    assert tested.planted == ()
    with pytest.raises(UsageError, match="the batch is broken as it is"):
        _ = tested.unseen
    with pytest.raises(UsageError, match="the batch is broken as it is"):
        list(tested)


@pytest.mark.slow
def test_a_warning_on_the_batch_as_it_is_comes_first_and_faults_are_planted_all_the_same() -> None:
    """All responses were cut, in each of the steps that are sound otherwise."""
    tested = GUARDS.self_test(batch(1, truncated=np.ones(RESPONSES)))
    assert (tested.as_given, tested.broken_by) == (("all-truncated",), ())
    assert str(tested).splitlines()[0] == "on the batch as it is: all-truncated"
    assert tested.unseen == ()


@pytest.mark.slow
def test_a_side_that_is_a_masked_array_hides_its_padding_from_faults_too() -> None:
    given = batch(1)
    hidden = np.ma.masked_array(np.asarray(given.log_mu), ~np.asarray(given.mask))
    assert str(GUARDS.self_test(batch(1, mask=None, log_mu=hidden))) == str(GUARDS.self_test(given))


@pytest.mark.slow
def test_it_prints_as_a_table() -> None:
    lines = str(GUARDS.self_test(batch(1))).splitlines()
    assert lines[0] == "on the batch as it is: no guard"
    assert lines[2].split("  ")[0] == "planted fault"
    assert any(line.split()[:7] == ["rewards", "times", "1e+06", "1", "1", "4", "reward-scale,"] for line in lines)


def test_a_batch_without_a_token_has_nothing_to_plant_faults_in() -> None:
    with pytest.raises(UsageError, match="no token of the batch counts"):
        GUARDS.self_test(batch(1, mask=np.zeros((RESPONSES, 40))))


def test_a_batch_that_is_one_side_twice_has_nothing_to_plant_faults_in() -> None:
    given = batch(1)
    with pytest.raises(UsageError, match="one side of the batch is a copy of the other"):
        GUARDS.self_test(batch(1, log_mu=given.log_pi))


def test_rewards_that_are_no_numbers_are_tested_as_they_are() -> None:
    assert "reward-nonfinite" in GUARDS.self_test(batch(1, rewards=["good"] * RESPONSES)).as_given


def test_a_batch_without_the_sampler_has_nothing_to_plant_faults_in() -> None:
    with pytest.raises(UsageError, match="give a batch with log_pi and log_mu"):
        GUARDS.self_test(batch(1, log_mu=None))
