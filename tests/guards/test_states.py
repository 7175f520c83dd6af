"""What guards remember: restored guards decide as those that were not interrupted."""

import json
import warnings
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import BrokenRecord, MismatchProbeError, UsageError
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from tests.guards.steps import LEARNT, REPORTED, RESPONSES, batch, probe


def test_what_is_no_state_of_guards_is_refused() -> None:
    with pytest.raises(BrokenRecord, match="no state of guards"):
        Guards.default().load_state_dict({})


@pytest.mark.parametrize("spoiled", [{"ceiling": 10**400}, {"factor": 10**400}, {"factor": 0}, {"clean": 1.5}])
def test_a_rate_that_no_run_had_is_refused(spoiled: dict[str, Any]) -> None:
    guards = Guards.default()
    state = guards.state_dict()
    state["rate"] |= spoiled
    with pytest.raises(BrokenRecord, match="no state of guards"):
        guards.load_state_dict(state)
    state["rate"] |= {"factor": 1, "ceiling": 1, "clean": 0}
    guards.load_state_dict(state)


@pytest.mark.parametrize(
    "spoiled",
    [{"blocks": [[0, [0.0] * 54]]}, {"blocks": [[1, [-1.0] * 54]]}, {"blocks": [[1, []]]}, {"base": ["both", 3]}, []],
)
def test_sums_of_entropies_that_no_run_had_are_refused(spoiled: Any) -> None:
    guards = Guards.default()
    with pytest.raises(MismatchProbeError):
        guards.load_state_dict({**guards.state_dict(), "entropies": spoiled})


@pytest.mark.slow
def test_restored_guards_decide_as_those_that_were_not_interrupted() -> None:
    def run(*, interrupted: bool) -> list[str]:
        guards, answers = Guards.default(can={"skip", "stop"}), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 12):
                spoiled = {"rewards": [np.nan] * RESPONSES} if step > 8 else {}
                answers.append(str(guards.observe(batch(step, **spoiled), probe=probe(step), **LEARNT)))
                if interrupted and step == 9:
                    state = json.loads(json.dumps(guards.state_dict(), allow_nan=False))
                    guards = Guards.default(can={"skip", "stop"})
                    guards.load_state_dict(state)
        return answers

    assert run(interrupted=True) == run(interrupted=False)


def test_a_state_that_a_version_before_wrote_goes_on_with_every_guard_and_its_level() -> None:
    """It held the book alone, and the floor of the first canary in it."""
    guards = Guards.default(can={"skip"})
    for step in range(1, 4):
        guards.observe(batch(step), probe=probe(step), metrics=REPORTED, **LEARNT)
    saved = guards.state_dict()
    resumed = Guards.default(can={"skip"})
    resumed.load_state_dict({name: saved[name] for name in ("evaluated", "guards")})
    with pytest.warns(UserWarning, match="step 4 lacks probe"):
        resumed.judge(4, batch(4).measure().metrics(), canary=False)
    assert resumed.off == {}

    def floors(state: dict[str, Any]) -> list[Any]:
        return [guard["rule"]["floor"] for guard in state["guards"] if guard["settings"]["rule"] == "floor"]

    assert floors(resumed.state_dict()) == floors(saved) != []


def test_a_state_goes_on_where_the_words_of_a_guard_s_source_are_others() -> None:
    """A version before wrote of the same threshold in other words."""
    state = Guards.default(can={"skip", "stop"}).state_dict()
    for guard in state["guards"]:
        guard["settings"]["source"] = "other words"
    resumed = Guards.default(can={"skip", "stop"})
    resumed.load_state_dict(state)
    assert resumed.state_dict() == Guards.default(can={"skip", "stop"}).state_dict()
    state["guards"][0]["settings"]["patience"] += 1
    with pytest.raises(UsageError, match="the guards differ"):
        resumed.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_guards_that_a_state_lacks_begin_anew_and_the_others_go_on() -> None:
    """A version before had fewer default guards."""
    new = {"returned-batch", "mismatch-floor", "temperature"}
    before = Guards([guard for guard in DEFAULT_GUARDS if guard.name not in new], can={"skip", "stop"})
    for step in range(1, 4):
        before.observe(batch(step), **LEARNT)
    state = json.loads(json.dumps(before.state_dict()))
    resumed = Guards.default(can={"skip", "stop"})
    with pytest.warns(UserWarning, match="knows nothing of returned-batch, temperature, mismatch-floor"):
        resumed.load_state_dict(state)
    assert {guard["settings"]["name"] for guard in resumed.state_dict()["guards"]}.isdisjoint(new)
    quiet = resumed.observe(batch(4), **LEARNT)
    assert not quiet.events
    assert resumed.off.keys() == before.off.keys() | {"mismatch-floor"}
    steps = [resumed.observe(batch(step, temperature=1.5), **LEARNT) for step in (5, 6)]
    assert "temperature" in {event.guard for event in steps[-1].events}
    again = Guards.default(can={"skip", "stop"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_guard_that_the_rules_lack_is_refused_by_name() -> None:
    guards = Guards.default(can={"skip", "stop"})
    guards.observe(batch(1), **LEARNT)
    fewer = Guards([guard for guard in DEFAULT_GUARDS if guard.name != "temperature"])
    with pytest.raises(UsageError, match=r"differ from .*\('temperature'\)"):
        fewer.load_state_dict(guards.state_dict())
