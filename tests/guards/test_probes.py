"""The probe of an engine in somebody's own loop: an engine that repeats itself is stale, one of several too."""

import json
import math
import warnings

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.probe import EngineProbes, Probe
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.stats.sequences import Floats
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
        decisions = guards.observe(probe=[now, Probe(now.log_pi, now.log_mu if step == 1 else stale)])
        fired_at.append("stale-engine" in fired(decisions.events))
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
    for guards_of_run in (guards, resumed):
        decisions = [guards_of_run.observe(probe=Probe(probe(10 * step).log_pi, log_mu)) for step in range(1, 4)]
        assert "stale-engine" in fired(decisions[1].events)


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


def shifted(log_ratio: Floats) -> Metrics:
    """What a step says whose update moved pi by `log_ratio` [T]; pi had half of each token's probability."""
    probed = EngineProbes()
    before = np.full(log_ratio.size, np.log(0.5))
    probed.take(Probe(before, before))
    return probed.take(Probe(before + log_ratio, before + log_ratio))


def update_size_fires(metrics: Metrics) -> bool:
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "update-size"))
    return any(book.evaluate(step, metrics).events for step in (1, 2))


def test_an_update_that_moves_two_tokens_of_a_small_probe_far_is_not_too_large() -> None:
    """As on a pretrained checkpoint that learns as it should: 24 tokens, of which two are pushed down step by step."""
    log_ratio = np.full(24, -0.03)
    log_ratio[:2] = -2.4
    metrics = shifted(log_ratio)
    assert metrics["update/policy_shift_k3"] > 0.1
    assert not update_size_fires(metrics)


def test_an_update_that_moves_most_tokens_far_is_too_large() -> None:
    for farthest in (-0.4, -5.0):
        log_ratio = np.full(24, -0.4)
        log_ratio[:2] = farthest
        assert update_size_fires(shifted(log_ratio))
