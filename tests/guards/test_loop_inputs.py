"""Somebody's own loop: which inputs switch which guards on, and which are refused in a sentence."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from tests.guards.steps import LEARNT, REPORTED, batch, probe


@pytest.mark.slow
def test_a_loop_that_gives_everything_has_every_guard_on_and_a_clean_run_fires_none() -> None:
    guards = Guards.default(can={"skip", "stop", "rollback", "resync", "lower_learning_rate", "tighten"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 31):
            decision = guards.observe(batch(step), probe=probe(step), metrics=REPORTED, **LEARNT)
            assert (decision.step, decision.events, decision.unsupported) == (step, (), ())
            assert not any((decision.skip, decision.stop, decision.rollback, decision.resync))
            assert (decision.factor, decision.tighten, decision.diagnosis) == (1.0, 1.0, None)
    assert {guard.is_on for guard in guards.explain()} == {True}


def test_an_absent_input_switches_guards_off_with_one_warning() -> None:
    guards = Guards.default(can={"skip", "stop"})
    assert {guard.state for guard in guards.explain()} == {"known at the first step"}
    bare = batch(1, entropy=None, rewards=None, prompt_ids=None, truncated=None)
    with pytest.warns(
        UserWarning, match=r"^guards that are off here for lack of an input: \d+ of \d+; print\(guards.explain\(\)\)"
    ) as warned:
        guards.observe(bare)
    assert len(warned) == 1
    assert len(str(warned[0].message)) <= 120
    assert str(warned[0].message) == guards.explain().off_sentence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guards.observe(bare)
    lacks = {guard.name: guard.lacks for guard in guards.explain() if not guard.is_on}
    assert lacks["temperature"] == ("entropy",)
    assert lacks["learning-rate-jump"] == ("learning_rate",)
    assert lacks["flat-groups"] == ("grad_norm", "rewards and prompt_ids")
    assert "mismatch-limit" not in lacks
    assert "temperature" in str(guards.explain())


@pytest.mark.parametrize("steps", [0, 2])
def test_explanations_fit_a_line_of_100_characters_and_lose_no_word(steps: int) -> None:
    guards = Guards.default(can={"skip", "stop"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, steps + 1):
            guards.observe(batch(step))
    explained = guards.explain()
    text = str(explained)
    assert max(map(len, text.splitlines())) <= 100
    words = {word for row in explained.rows for cell in row for word in cell.split()}
    assert words <= set(text.split())
    assert len(text.splitlines()) > len(explained.rows), "some cells go on in a line below"


def test_an_answer_that_is_asked_for_several_times_stands_there_once() -> None:
    rows = {row[0]: row[3] for row in Guards.default().explain().rows}
    assert rows["stale-engine"] == "skip_update* + resync* (4 times), stop*"
    able = {row[0]: row[3] for row in Guards.default(can={"skip", "stop"}).explain().rows}
    assert able["stale-engine"] == "skip_update + resync* (4 times), stop"
    assert able["temperature"] == "skip_update, stop"


def test_guards_show_how_many_they_are_what_the_loop_can_do_and_how_far_it_is() -> None:
    guards = Guards.default(can={"skip", "stop"})
    assert repr(guards) == f"Guards({len(DEFAULT_GUARDS)} guards; can skip_update, stop; no step yet)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guards.observe(batch(1), step=7)
    on, off = len(DEFAULT_GUARDS) - len(guards.off), len(guards.off)
    assert repr(guards).endswith(f"step 7: {on} on, {off} off)")
    assert repr(Guards.default()).startswith(f"Guards({len(DEFAULT_GUARDS)} guards; can warn alone;")


def test_a_metric_that_a_decision_lacks_is_answered_with_the_nearest_name() -> None:
    guards = Guards.default()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decision = guards.observe(batch(1))
    with pytest.raises(KeyError, match="no metric 'mismatch/kl_k4'; did you mean 'mismatch/kl_k"):
        decision.metrics["mismatch/kl_k4"]
    assert decision.metrics.get("mismatch/kl_k4") is None


def test_what_a_guard_is_said_to_need_gives_its_metric() -> None:
    given = set()
    guards = Guards.default()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given |= guards.observe(batch(1), probe=probe(1), **LEARNT).metrics.keys()
    for guard, explained in zip(DEFAULT_GUARDS, guards.explain(), strict=True):
        by_name = [f"metrics[{name!r}]" for name in guard.metrics if name not in given]
        assert set(explained.lacks) == set(by_name), guard.name
        assert set(guard.metrics) - given == {need[9:-2] for need in explained.needs if need.startswith("metrics[")}


def test_an_unknown_action_and_a_step_seen_twice_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'roll', .*did you mean 'rollback'"):
        Guards.default(can={"roll"})
    guards = Guards.default()
    with pytest.warns(UserWarning, match="off here"):
        guards.observe(batch(1), step=5)
    with pytest.raises(UsageError, match="step 5 comes after step 5"):
        guards.observe(batch(2), step=5)


@pytest.mark.parametrize(
    ("can", "sentence"),
    [
        ("skip", r"can is one word, 'skip': give a set of actions, such as \{'skip'\}"),
        ({"skpi"}, "can names 'skpi', which is no action of guards; did you mean 'skip'"),
    ],
)
def test_a_misspelt_action_is_one_sentence(can: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Guards.default(can=can)


@pytest.mark.filterwarnings("ignore:guards that are off")
@pytest.mark.parametrize(
    ("step", "sentence"), [(0, "step 0 is before the first"), (1.5, "step 1.5 is no whole number")]
)
def test_a_step_is_a_whole_number_from_one(step: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Guards.default().observe(batch(1), step=step)
    guards = Guards.default()
    assert guards.observe(batch(1), step=np.int64(1)).step == 1
    json.dumps(guards.state_dict(), allow_nan=False)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_nothing_of_a_refused_step_is_remembered() -> None:
    guards = Guards.default()
    guards.observe(batch(1), probe=probe(1), **LEARNT)
    before = guards.state_dict()
    for refused in ({"step": 1}, {"loss": "none"}):
        with pytest.raises((UsageError, ValueError)):
            guards.observe(batch(2), probe=probe(2), **{**LEARNT, **refused})
    assert guards.state_dict() == before


def test_an_input_that_a_later_step_lacks_is_named_once() -> None:
    guards = Guards.default()
    with pytest.warns(UserWarning, match="off here"):
        guards.observe(batch(1), **LEARNT)
    with pytest.warns(UserWarning, match="step 2 lacks entropy, rewards") as warned:
        guards.observe(batch(2, entropy=None, rewards=None), **LEARNT)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guards.observe(batch(3, entropy=None, rewards=None), **LEARNT)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_metric_that_is_none_is_absent() -> None:
    metrics = {**REPORTED, "time/reward_seconds": None}
    assert Guards.default().observe(batch(1), metrics=metrics).metrics.keys().isdisjoint({"time/reward_seconds"})


def test_a_misspelt_metric_is_not_laid_to_an_input_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "guards.toml"
    path.write_text('[[guard]]\nname = "mine"\nrule = "nonfinite"\nmetric = "mismatch/kl_k33"\nactions = ["stop"]')
    guards = Guards.from_file(path)
    with pytest.warns(UserWarning, match="guards that are off here"):
        guards.observe(batch(1))
    assert next(guard.lacks for guard in guards.explain() if guard.name == "mine") == ("metrics['mismatch/kl_k33']",)


def test_guards_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "guards.toml"
    path.write_text(
        'defaults = false\n[[guard]]\nname = "mine"\nrule = "limit"\nmetric = "loop/lag"\nabove = 3\n'
        'actions = ["stop"]\n'
    )
    guards = Guards.from_file(path, can={"stop"})
    assert guards.explain().guards[0].needs == ("metrics['loop/lag']",)
    assert not guards.observe(metrics={"loop/lag": 1}).stop
    decision = guards.observe(metrics={"loop/lag": 5})
    assert decision.stop
    with pytest.raises(UsageError, match="resume with the same"):
        Guards.default().load_state_dict(guards.state_dict())
