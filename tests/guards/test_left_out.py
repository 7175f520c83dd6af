"""Tokens of a step that lack a log-prob: few are left out and counted, many leave nothing to judge by."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.plausible import left_out_sentence
from mismatch_probe.guards.sums import Metrics, Sums
from mismatch_probe.stats.zeros import LeftOutTotals
from tests.guards.steps import batch, fired

SOUND = batch(1)
COUNTED = np.flatnonzero(np.asarray(SOUND.mask).ravel())


def lacking(places: Any, given: Batch = SOUND, name: str = "log_mu", **others: Any) -> Batch:
    """With NaN in a column at some of the tokens that count."""
    values = np.array(getattr(given, name), dtype=np.float64)
    values.ravel()[COUNTED[places]] = np.nan
    return replace(given, **{name: values}, **others)


def mismatch(given: Batch) -> Metrics:
    return {name: value for name, value in given.measure().metrics().items() if name.startswith("mismatch/")}


@pytest.mark.parametrize("name", ["log_mu", "log_pi", "entropy"])
def test_the_others_are_measured_as_if_the_few_were_not_there(name: str) -> None:
    part = mismatch(lacking([0, 50, 51], name=name))
    mask = np.array(SOUND.mask)
    mask.ravel()[COUNTED[[0, 50, 51]]] = False
    expected = mismatch(replace(SOUND, mask=mask))
    for metric in ("kl_k3", "abs_logprob_diff", "ess_token", "is_ratio_mean", "temperature_fit", "scale_share"):
        assert part[f"mismatch/{metric}"] == pytest.approx(expected[f"mismatch/{metric}"], rel=1e-12), metric
    assert part["mismatch/nonfinite_tokens"] == 3
    assert 0.004 < part["mismatch/left_out_share"] < 0.05


def test_metrics_of_whole_responses_are_of_those_that_lack_none() -> None:
    part = mismatch(lacking([0]))
    others = {name: np.asarray(getattr(SOUND, name))[1:] for name in ("log_pi", "log_mu", "mask")}
    expected = mismatch(Batch(**others))
    for name in ("ess_seq", "abs_logprob_diff_seq", "log_ppl_diff", "chi2_seq"):
        assert part[f"mismatch/{name}"] == pytest.approx(expected[f"mismatch/{name}"], rel=1e-12), name


def test_where_each_response_lacks_a_token_only_metrics_of_whole_ones_are_absent() -> None:
    rng = np.random.default_rng(0)
    log_mu = -rng.exponential(1, (4, 60))
    log_pi = np.minimum(log_mu + 0.01 * rng.standard_normal((4, 60)), 0)
    log_mu[:, 7] = np.nan
    found = mismatch(Batch(log_pi, log_mu, mask=True))
    assert {"mismatch/ess_seq", "mismatch/chi2_seq", "mismatch/ppl_ratio"}.isdisjoint(found)
    assert all(np.isfinite(value) for value in found.values())


@pytest.mark.parametrize("share", [0.04, 0.06])
def test_more_than_a_twentieth_of_the_tokens_leaves_nothing(share: float) -> None:
    places = np.linspace(0, COUNTED.size - 1, int(share * COUNTED.size)).astype(int)
    likeliest = np.argsort(-np.asarray(SOUND.log_pi).ravel()[COUNTED])[: places.size]
    assert np.isnan(mismatch(lacking(likeliest))["mismatch/kl_k3"]) == (share > 0.05)


def test_few_tokens_with_most_of_the_surprisal_leave_nothing() -> None:
    unlikeliest = np.argsort(np.asarray(SOUND.log_pi).ravel()[COUNTED])[:12]
    found = mismatch(lacking(unlikeliest))
    assert 12 / COUNTED.size < 0.04
    assert np.isnan(found["mismatch/kl_k3"])


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.26, 2.0])
@pytest.mark.parametrize("name", ["log_mu", "log_pi"])
def test_what_is_there_and_can_be_no_log_prob_is_a_fault_however_rare(name: str, value: float) -> None:
    values = np.array(getattr(SOUND, name))
    values.ravel()[COUNTED[5]] = value
    spoiled = replace(SOUND, **{name: values})
    assert np.isnan(mismatch(spoiled)["mismatch/kl_k3"])
    with pytest.warns(UserWarning, match="guards that are off"):
        assert "mismatch-nonfinite" in fired(Guards.default().observe(spoiled).events)


def test_a_loop_that_asks_for_every_log_prob_is_told_of_the_first_that_is_missing() -> None:
    strict = lacking([5], in_part=False)
    assert np.isnan(mismatch(strict)["mismatch/kl_k3"])
    with pytest.warns(UserWarning, match="guards that are off"):
        assert "mismatch-nonfinite" in fired(Guards.default(can={"skip"}).observe(strict).events)


def test_what_is_left_out_is_told_once_and_the_mismatch_beside_it_is_seen() -> None:
    guards = Guards.default(can={"skip", "stop"})
    with pytest.warns(UserWarning, match="guards that are off"):
        assert not guards.observe(batch(1)).events
    with pytest.warns(
        UserWarning, match=r"step 2: 2 of \d+ tokens \(.* lack a log-prob and are left out; this warning comes once"
    ):
        guards.observe(lacking([3, 4], batch(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (3, 4):
            decision = guards.observe(lacking([3, 4], batch(step, noise=1.0)))
    assert "mismatch-limit" in fired(decision.events)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_step_that_lacks_many_says_how_many_and_is_given_up() -> None:
    guards = Guards.default(can={"skip", "stop"})
    with pytest.warns(UserWarning, match=r"lack a log-prob, and more than 5 % \(by number, or by surprisal\)"):
        decision = guards.observe(lacking(slice(0, 60)))
    assert decision.skip
    assert decision.diagnosis is not None
    assert "gave no log-prob that can be used for 60 tokens" in str(decision.diagnosis)


def test_ranks_add_up_what_they_leave_out_before_they_decide() -> None:
    """All of the tokens that are missing are on one rank of four: a tenth of its own, and a fortieth of all."""
    rows = [lacking(np.arange(0, 40, 8)) if rank == 0 else batch(rank + 1) for rank in range(4)]
    sums = [row.measure() for row in rows]
    together = Sums.of_arrays([one.to_array() for one in sums]).metrics()
    assert together["mismatch/nonfinite_tokens"] == 5
    assert np.isfinite(together["mismatch/kl_k3"])


def test_the_surprise_of_tokens_needs_no_log_prob_of_the_sampler() -> None:
    """The tokens that an engine leaves out may be the surprising ones: a mean without them would blame the engine."""
    part, complete_value = (mismatch(given) for given in (lacking([8, 9, 10]), SOUND))
    assert part["mismatch/surprise_mean"] == complete_value["mismatch/surprise_mean"]


def test_a_few_tokens_that_are_left_out_are_no_cause_of_an_end() -> None:
    few = {"mismatch/nonfinite_tokens": 3.0, "mismatch/missing_mu_tokens": 3.0, "mismatch/kl_k3": 1e-4}
    assert diagnose({1: few | {"optim/loss": np.nan}}, []).cause is EndCause.NONFINITE_GRADIENT
    assert diagnose({1: few | {"mismatch/kl_k3": np.nan}}, []).cause is EndCause.MISSING_LOGPROBS


def test_a_step_without_any_log_prob_lacks_100_percent() -> None:
    """Two significant digits wrote 1e+02 %."""
    sentence = left_out_sentence(LeftOutTotals(tokens=40, out=40, surprisal=30.0, surprisal_out=30.0))
    assert sentence is not None
    assert sentence.startswith("40 of 40 tokens (100 %, 100 % of the surprisal) lack a log-prob")


@pytest.mark.filterwarnings("ignore:guards that are off", "ignore:step 1.* lack a log-prob")
@pytest.mark.parametrize(("name", "whose"), [("log_mu", "The engine"), ("log_pi", "The trainer")])
@pytest.mark.parametrize(
    ("value", "named"), [(0.0, "gave 0 as the log-prob of"), (0.7, "above 0"), (3.0, "above 0"), (np.nan, None)]
)
def test_what_stands_in_place_of_a_log_prob_is_named(name: str, whose: str, value: float, named: str | None) -> None:
    values = np.array(getattr(SOUND, name), dtype=np.float64)
    values.ravel()[COUNTED[::3]] = value
    decision = Guards.default(can={"skip"}).observe(replace(SOUND, **{name: values}))
    assert decision.diagnosis is not None
    if named is None:
        assert "0, " not in decision.diagnosis.sentence
        assert ("missing or not finite" in decision.diagnosis.sentence) is (name == "log_pi")
        return
    assert decision.diagnosis.cause is EndCause.MISSING_LOGPROBS
    assert named in decision.diagnosis.sentence
    assert "not finite" not in decision.diagnosis.sentence
    assert value or decision.diagnosis.sentence.startswith(whose)


def test_zeros_that_both_sides_agree_on_are_none_that_stand_for_nothing() -> None:
    sides = {name: np.array(getattr(SOUND, name)) for name in ("log_pi", "log_mu")}
    for side in sides.values():
        side[np.asarray(sides["log_mu"]) > -0.01] = 0.0
    found = replace(SOUND, **sides).measure().metrics()
    assert (found["mismatch/zero_tokens"], found["mismatch/above_zero_tokens"]) == (0, 0)


@pytest.mark.parametrize("name", ["log_mu", "log_pi"])
def test_a_log_prob_that_was_rounded_above_zero_is_measured(name: str) -> None:
    values = np.array(getattr(SOUND, name), dtype=np.float64)
    values[values > -0.05] = 0.25
    found = replace(SOUND, **{name: values}).measure().metrics()
    assert found["mismatch/above_zero_tokens"] == 0
    assert np.isfinite(found["mismatch/kl_k3"])


@pytest.mark.parametrize(("name", "other"), [("log_mu", "log_pi"), ("log_pi", "log_mu")])
def test_a_zero_of_the_other_side_is_not_what_a_token_lacks(name: str, other: str) -> None:
    values, sure = (np.array(getattr(SOUND, side), dtype=np.float64) for side in (name, other))
    sure[sure > -0.1] = 0.0
    values.ravel()[COUNTED[::3]] = np.nan
    found = replace(SOUND, **{name: values, other: sure}).measure().metrics()
    assert found["mismatch/nonfinite_tokens"] == COUNTED[::3].size
    assert found["mismatch/zero_tokens"] == 0


@pytest.mark.parametrize(
    ("out", "tokens", "written"), [(32, 634, "just over 5 %"), (31, 634, "4.9 %"), (50, 1000, "5 %")]
)
def test_a_share_of_tokens_left_out_does_not_read_as_the_most_that_may_be(out: int, tokens: int, written: str) -> None:
    sentence = left_out_sentence(LeftOutTotals(tokens=tokens, out=out, surprisal=1000.0))
    assert sentence is not None
    assert f"({written}, 0 % of the surprisal)" in sentence
    assert ("leave nothing to judge by" in sentence) == (written == "just over 5 %")
