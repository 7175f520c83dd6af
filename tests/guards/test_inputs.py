"""What the public API says to inputs of a wrong kind, and to batches that cannot be right."""

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mismatch_probe as mp
from mismatch_probe.errors import BrokenRecord, MismatchProbeError, UsageError
from mismatch_probe.guards.guards import Guards
from mismatch_probe.stats.zeros import LeftOutTotals
from tests.guards.steps import RESPONSES, batch

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off", "ignore:step 2 lacks")

SOUND = batch(1)
STATE = Guards.default().state_dict()
TOO_LARGE = 10**400


def observed() -> Guards:
    guards = Guards.default(can={"skip"})
    guards.observe(SOUND, loss=0.3, grad_norm=0.5)
    return guards


def of_arrays(name: str) -> Callable[[Any], object]:
    return lambda value: replace(SOUND, **{name: value}).measure()


def compared(name: str) -> Callable[[Any], object]:
    arrays = {"log_pi": SOUND.log_pi, "log_mu": SOUND.log_mu, "mask": SOUND.mask, "prompt_ids": SOUND.prompt_ids}
    return lambda value: mp.compare_logprobs(**{**arrays, name: value})


def observing(name: str) -> Callable[[Any], object]:
    return lambda value: observed().observe(**{"batch": SOUND, name: value})


CALLS: dict[str, Callable[[Any], object]] = {
    "Guards": lambda value: mp.Guards(value),
    "can": lambda value: mp.Guards.default(can=value),
    "one of can": lambda value: mp.Guards.default(can=[value]),
    "from_file": lambda value: mp.Guards.from_file(value),
    "batch": observing("batch"),
    "step": observing("step"),
    "probe": observing("probe"),
    "one probe": lambda value: observed().observe(SOUND, probe=[value]),
    "loss": observing("loss"),
    "grad_norm": observing("grad_norm"),
    "loss_scale": observing("loss_scale"),
    "metrics": observing("metrics"),
    "one of metrics": lambda value: observed().observe(SOUND, metrics={"loop/lag": value}),
    "canary": observing("canary"),
    "later loss": lambda value: observed().observe_update(loss=value),
    "later metrics": lambda value: observed().observe_update(metrics=value),
    "went_back": lambda value: observed().went_back(value),
    "self_test": lambda value: mp.Guards.default().self_test(value),
    "state": lambda value: mp.Guards.default().load_state_dict(value),
    "guards of a state": lambda value: mp.Guards.default().load_state_dict({**STATE, "guards": value}),
    "probed of a state": lambda value: mp.Guards.default().load_state_dict({**STATE, "probed": value}),
    "history of a state": lambda value: mp.Guards.default().load_state_dict({**STATE, "history": value}),
    "last step of a state": lambda value: mp.Guards.default().load_state_dict({**STATE, "last_step": value}),
    "of_array": lambda value: mp.Sums.of_array(value),
    "of_arrays": lambda value: mp.Sums.of_arrays(value),
    "log_pi of a probe": lambda value: mp.Probe(value, [-1.0, -2.0]).tokens(),
    "log_mu of a probe": lambda value: mp.Probe([-1.0, -2.0], value).tokens(),
    "open_run": lambda value: mp.open_run(value),
    **{
        f"{name} of a batch": of_arrays(name)
        for name in ("log_pi", "log_mu", "mask", "entropy", "prompt_ids", "rewards", "truncated")
    },
    **{
        f"{name} compared": compared(name)
        for name in ("log_pi", "log_mu", "mask", "log_ref", "entropy", "prompt_ids", "train_dtype", "level")
    },
    "computed_apart": compared("computed_apart"),
}
WRONG = {
    "array without dimensions": np.array(object()),
    "structured array": np.ones(2, dtype="i4,f4"),
    "complex array": np.ones(2, dtype="c8"),
    "text": "x",
    "bytes": b"x",
    "object": object(),
    "too large": TOO_LARGE,
    "complex": 1j,
    "set": {1.5},
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_of_a_wrong_kind_is_refused_in_a_sentence(name: str, kind: str) -> None:
    with pytest.raises(MismatchProbeError) as refused:
        CALLS[name](WRONG[kind])
    assert len(str(refused.value).splitlines()) == 1
    assert "unexpected" not in str(refused.value)


NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.sampled_from([TOO_LARGE, -TOO_LARGE, Decimal("NaN"), Decimal("1e500"), np.ma.masked, np.float16(1)]),
    st.sampled_from([np.datetime64("2026-01-01"), np.datetime64("NaT"), np.array(3), np.array([3.0]), object(), int]),
)
LEAVES = NUMBERS | st.text(max_size=5) | st.binary(max_size=5)
ARRAYS = st.builds(
    lambda kind, shape: np.ones(shape, dtype=kind),
    st.sampled_from(["f2", "f4", "i8", "u1", "?", "c8", "U3", "S3", "M8[s]", "m8[s]", "O", "i4,f4"]),
    st.sampled_from([(), (0,), (2,), (RESPONSES,), (2, 2), (RESPONSES, 40), (0, 3), (2, 2, 2)]),
)
VALUES = st.recursive(
    LEAVES | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["guards", "evaluated", "loss", 1, None]), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.lists(inner, min_size=1, max_size=1).map(lambda one: one * RESPONSES)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(CALLS)), value=VALUES)
def test_whatever_is_passed_in_ends_in_an_answer_or_in_a_documented_error(name: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UserWarning)
        with suppress(MismatchProbeError):
            CALLS[name](value)


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.array([0.5]), np.array(0.5), Decimal("0.5")])
def test_a_number_of_any_kind_is_taken(loss: Any) -> None:
    assert observed().observe(SOUND, loss=loss).metrics["optim/loss"] == 0.5


def test_nothing_of_a_state_that_is_refused_is_taken_over() -> None:
    guards = observed()
    before = guards.state_dict()
    for spoiled in ({**before, "history": 3}, {**before, "guards": 3}, {**before, "last_step": "x"}):
        with pytest.raises((BrokenRecord, UsageError)):
            guards.load_state_dict(spoiled)
    assert guards.state_dict() == before
    counted = [{**saved, "escalation": {**saved["escalation"], "firings": "x"}} for saved in before["guards"]]
    with pytest.raises(BrokenRecord, match="no whole number"):
        guards.load_state_dict({**before, "guards": counted})
    for clean in ("x", None, [], 1.5, True):
        with pytest.raises(BrokenRecord, match="count of clean steps is no whole number"):
            guards.load_state_dict({**before, "rate": {**before["rate"], "clean": clean}})
    guards.load_state_dict(before)
    assert guards.state_dict() == before


def places(state: Any, *path: str | int) -> list[tuple[str | int, ...]]:
    """Of every value inside a state."""
    keys = list(state) if isinstance(state, dict) else list(range(len(state)) if isinstance(state, list) else ())
    return [place for key in keys for place in ((*path, key), *places(state[key], *path, key))]


@pytest.mark.slow
@pytest.mark.parametrize("value", ["x", None, [], {}, -1, [["a"]], 0.5])
def test_a_state_with_anything_else_in_any_place_is_refused_or_goes_on(value: object) -> None:
    guards = observed()
    guards.observe(batch(2), loss=0.3, grad_norm=0.5, learning_rate=1e-5)
    state = guards.state_dict()
    of_rules = {saved["settings"]["rule"]: saved for saved in state["guards"]}
    state |= {"guards": list(of_rules.values()), "events": state["events"][:1]}
    measured = batch(3).measure()
    for *outer, last in places({name: part for name, part in state.items() if name != "history"}):
        if "settings" in outer:
            continue
        spoiled = copy.deepcopy(state)
        inner = reduce(lambda part, key: part[key], outer, spoiled)
        inner[last] = value
        resumed = Guards.default(can={"skip"})
        with warnings.catch_warnings(), suppress(MismatchProbeError):
            warnings.simplefilter("ignore")
            resumed.load_state_dict(spoiled)
            resumed.observe(measured, loss=0.3, grad_norm=0.5)


NUMBERS_OF_A_PART = SOUND.measure().to_array().size


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -1.0, 0.5, 1e300])
def test_sums_with_anything_else_in_any_place_are_refused_in_a_sentence_or_judged(value: float) -> None:
    judged, sound = [], SOUND.measure().to_array()
    for place in range(NUMBERS_OF_A_PART):
        array = sound.copy()
        array[place] = value
        with suppress(UsageError):
            Guards.default(can={"skip"}).observe(mp.Sums.of_array(array), loss=0.3)
            judged.append(place)
    assert not (judged and math.isnan(value))


def test_what_does_not_fit_in_sums_is_named() -> None:
    for spoiled, named in (
        (replace(SOUND.measure(), left_out=LeftOutTotals()), "pair.tokens does not fit"),
        (replace(SOUND.measure(), missing_mu=math.nan), "missing_mu is NaN"),
        (replace(SOUND.measure(), left_out=replace(SOUND.measure().left_out, out=math.nan)), "left_out.out is NaN"),
    ):
        with pytest.raises(UsageError, match=f"the Sums are of no batch, for {named}"):
            observed().observe(spoiled)


def test_the_sums_of_any_batch_are_possible() -> None:
    nothing = np.full_like(np.asarray(SOUND.log_mu), np.nan)
    for sound in (
        SOUND,
        batch(2, temperature=3.0),
        replace(SOUND, entropy=None),
        replace(SOUND, log_mu=None),
        replace(SOUND, log_mu=nothing),
        replace(SOUND, log_mu=SOUND.log_pi),
        replace(SOUND, rewards=[math.nan, -math.inf, *[1e200] * (RESPONSES - 2)]),
        replace(SOUND, mask=np.zeros_like(np.asarray(SOUND.mask))),
    ):
        assert sound.measure().impossible() is None
        assert (sound.measure() + SOUND.measure()).impossible() is None


BELOW_ZERO: dict[str, tuple[Callable[[], object], str]] = {
    "norm": (lambda: observed().observe(SOUND, grad_norm=-1), "grad_norm is -1, which cannot be below 0"),
    "norm that overflowed": (lambda: observed().observe(SOUND, grad_norm=-math.inf), "grad_norm is -inf, which cannot"),
    "norm of a later update": (lambda: observed().observe_update(grad_norm=-1), "grad_norm is -1, which cannot be"),
    "rate": (lambda: observed().observe(SOUND, learning_rate=-1e-5), "learning_rate is -1e-05, which cannot be below"),
    "loss scale": (lambda: observed().observe(SOUND, loss_scale=-2), "loss_scale is -2, which cannot be below 0"),
    "norm by its name": (
        lambda: observed().observe(SOUND, metrics={"optim/grad_norm": -1}),
        r"metrics\['optim/grad_norm'\] is -1, which cannot be below 0",
    ),
    "share": (
        lambda: observed().observe(SOUND, metrics={"response/unended_share": -0.5}),
        r"metrics\['response/unended_share'\] is -0.5, which cannot",
    ),
    "responses": (
        lambda: observed().observe(mp.Sums(tokens=9.0, responses=-4.0)),
        "responses is -4, which is no count",
    ),
    "tokens": (lambda: observed().observe(mp.Sums(tokens=-9.0, responses=4.0)), "tokens is -9, which is no count"),
}


@pytest.mark.parametrize("name", BELOW_ZERO)
def test_what_cannot_be_below_0_is_refused_and_not_remembered(name: str) -> None:
    call, sentence = BELOW_ZERO[name]
    with pytest.raises(UsageError, match=sentence):
        call()


def test_numbers_that_may_be_0_negative_or_none_are_taken() -> None:
    given = {"loss": -0.3, "grad_norm": 0.0, "learning_rate": 0.0, "metrics": {"loop/lag": -2.0, "reward/mean": -1.0}}
    assert not observed().observe(SOUND, **given).events
    assert observed().observe(SOUND, grad_norm=math.nan).metrics["optim/nonfinite_gradients"] == 1


def test_an_entropy_below_0_is_a_fault_and_one_that_was_rounded_there_is_none() -> None:
    spoiled = np.array(SOUND.entropy)
    spoiled[0, 0] = -1.0
    assert math.isnan(replace(SOUND, entropy=spoiled).measure().metrics()["mismatch/kl_k3"])
    spoiled[0, 0] = -1e-3
    assert not replace(SOUND, entropy=spoiled).measure().faults


@pytest.mark.parametrize("step", [10**9, 2, -1])
def test_a_rollback_to_a_step_that_never_was_is_refused(step: int) -> None:
    guards = observed()
    before = guards.state_dict()
    with pytest.raises(UsageError, match=rf"went_back\({step}\) names no step before, for the last one was 1"):
        guards.went_back(step)
    assert guards.state_dict() == before
    guards.went_back(1)
    guards.went_back(0)
    if step > 0:
        with pytest.raises(UsageError, match="for no step was observed yet"):
            Guards.default().went_back(step)


def test_guards_without_a_guard_are_refused() -> None:
    with pytest.raises(UsageError, match="settings holds no guard, so nothing could ever fire"):
        Guards([])
    with pytest.raises(UsageError, match=r"Guards needs settings: use Guards\.default\(\)"):
        Guards()


def test_an_object_that_is_no_path_opens_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="None is no path; give a text"):
        mp.open_run(None)
    with pytest.raises(UsageError, match="holds no run"):
        mp.open_run(tmp_path)
