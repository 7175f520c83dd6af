"""The probe of an engine in somebody's own loop: an engine that repeats itself is stale, one of several too."""

import json
import math
import warnings

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.probe import Probe
from tests.guards.steps import fired, probe


def test_an_engine_that_repeats_itself_while_the_policy_moves_is_stale() -> None:
    guards = Guards.default(can={"skip", "resync"})
    log_mu = probe(1).log_mu
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decisions = [guards.observe(probe=Probe(probe(10 * step).log_pi, log_mu)) for step in range(1, 4)]
    assert [decision.resync for decision in decisions] == [False, True, True]
    assert fired(decisions[1].events) == {"stale-engine"}


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_one_stale_engine_of_several_is_seen_also_after_a_resume() -> None:
    """Together their log-probs are never those from before."""
    guards = Guards.default(can={"skip", "resync"})
    stale = probe(1).log_mu
    fired_at = []
    for step in range(1, 4):
        now = probe(10 * step)
        said = guards.observe(probe=[now, Probe(now.log_pi, now.log_mu if step == 1 else stale)])
        fired_at.append("stale-engine" in fired(said.events))
        resumed = Guards.default(can={"skip", "resync"})
        resumed.load_state_dict(json.loads(json.dumps(guards.state_dict(), allow_nan=False)))
        guards = resumed
    assert fired_at == [False, False, True]


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_probe_without_numbers_is_kept_as_json_and_is_no_level() -> None:
    guards = Guards.default(can={"resync"})
    guards.observe(probe=Probe(probe(0).log_pi, np.zeros(64)))
    state = json.loads(json.dumps(guards.state_dict(), allow_nan=False))
    resumed = Guards.default(can={"resync"})
    resumed.load_state_dict(state)
    log_mu = probe(0).log_mu
    for told in (guards, resumed):
        said = [told.observe(probe=Probe(probe(10 * step).log_pi, log_mu)) for step in range(1, 4)]
        assert "stale-engine" in fired(said[1].events)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_pi_that_comes_back_to_an_engine_which_skipped_updates_left_alone_makes_it_no_stale_one() -> None:
    """As where the trainer scored other tokens for two steps, whose updates were withheld."""
    guards = Guards.default(can={"skip", "resync"})
    given, random = probe(1), np.random.default_rng(0)
    other = np.asarray(given.log_pi) - random.exponential(5, 64)
    fired_at = []
    for log_pi in (given.log_pi, other, other, given.log_pi, given.log_pi):
        fired_at.append("stale-engine" in fired(guards.observe(probe=Probe(log_pi, given.log_mu)).events))
    assert fired_at == [False, True, True, False, False]


@pytest.mark.parametrize("empty", [[], np.zeros(0), [[]]])
def test_a_probe_without_a_token_and_a_list_without_a_probe_are_refused(empty: object) -> None:
    with pytest.raises(UsageError, match="the probe holds no token"):
        Probe(empty, empty)
    with pytest.raises(UsageError, match="the probe holds no token"):
        Probe([-1.0, -2.0], [-1.0, -2.0], [0, 0])
    with pytest.raises(UsageError, match="probe is an empty list: give a Probe for each engine, or leave it out"):
        Guards.default().observe(probe=[])


@pytest.mark.filterwarnings("ignore:guards that are off", "ignore:step")
def test_a_probe_of_numbers_that_are_no_log_probs_is_no_measurement() -> None:
    guards = Guards.default(can={"resync"})
    guards.observe(probe=probe(1))
    decision = guards.observe(probe=Probe(-probe(2).log_pi + 1.01, probe(2).log_mu))
    assert math.isnan(decision.metrics["sync/probe_k3"])
    assert decision.resync
