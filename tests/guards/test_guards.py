"""The guards in somebody's own loop: what they are given, what they decide, what they remember."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.defaults import DEFAULT_GUARDS
from mismatch_probe.guards.diagnosis import EndCause
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.probe import Probe
from mismatch_probe.guards.sums import Sums
from tests.guards.steps import RESPONSES, batch, fired

LEARNT = {"loss": 0.3, "grad_norm": 0.5, "learning_rate": 1e-5}
REPORTED = {
    "sync/weights_unchanged": 0.0,
    "sync/weights_other": 0.0,
    "time/reward_seconds": 0.1,
    "reward/unrepeated": 0.0,
    "reward/mispaired": 0.0,
    "reward/mispaired_error": 0.0,
    "response/unended_share": 0.0,
    "correction/rejected_share": 0.0,
    "correction/clipped_share": 0.0,
}


def probe(step: int) -> Probe:
    rng = np.random.default_rng(7)
    log_pi = -rng.exponential(1, 64) - 1e-3 * step * rng.random(64)
    return Probe(log_pi, log_pi + 1e-3 * np.random.default_rng(step).standard_normal(64))


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
    assert {guard.state for guard in guards.explain()} == {"told at the first step"}
    bare = batch(1, entropy=None, rewards=None, prompt_ids=None, truncated=None)
    with pytest.warns(
        UserWarning, match=r"^guards that are off here for lack of an input: \d+ of \d+; print\(guards.explain\(\)\)"
    ) as warned:
        guards.observe(bare)
    assert len(warned) == 1
    assert len(str(warned[0].message)) <= 120
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guards.observe(bare)
    lacks = {guard.name: guard.lacks for guard in guards.explain() if not guard.is_on}
    assert lacks["temperature"] == ("entropy",)
    assert lacks["learning-rate-jump"] == ("learning_rate",)
    assert lacks["flat-groups"] == ("grad_norm", "rewards and prompt_ids")
    assert "mismatch-limit" not in lacks
    assert "temperature" in str(guards.explain())


@pytest.mark.parametrize(
    ("changed", "guard", "action"),
    [
        ({"temperature": 0.7}, "temperature", "skip"),
        ({"rewards": np.array([1.0, np.nan] * (RESPONSES // 2))}, "reward-nonfinite", "skip"),
        ({"rewards": ["1.0", "high"] * (RESPONSES // 2)}, "reward-nonfinite", "skip"),
        ({"rewards": [None, 1.0] * (RESPONSES // 2)}, "reward-nonfinite", "skip"),
        ({"log_mu": np.zeros((RESPONSES, 40))}, "mismatch-nonfinite", "skip"),
        ({"noise": 0.6}, "mismatch-limit", "skip"),
    ],
    ids=["temperature", "NaN reward", "text as reward", "no reward", "no log-probs", "other weights"],
)
def test_a_fault_is_decided_on_before_the_update(changed: dict[str, object], guard: str, action: str) -> None:
    guards = Guards.default(can={"skip", "stop"})
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 4):
            assert not guards.observe(batch(step), **LEARNT).skip
        for step in range(4, 6):
            decision = guards.observe(batch(step, **changed), **LEARNT)
            seen += [guard] if guard in fired(decision.events) and getattr(decision, action) else []
    assert seen
    assert decision.diagnosis is not None
    assert guard in str(decision)


@pytest.mark.filterwarnings("ignore:guards that are off")
@pytest.mark.parametrize("onset", [1, 5])
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_one_gradient_that_is_not_finite_is_named_and_its_update_withheld(norm: float, onset: int) -> None:
    guards = Guards.default(can={"skip", "stop"})
    for step in range(1, onset + 20):
        decision = guards.observe(batch(step), **{**LEARNT, "grad_norm": norm if step == onset else 0.5})
        assert fired(decision.events) == ({"gradient-nonfinite"} if step == onset else set())
        assert decision.skip == (step == onset)
        if step == onset:
            assert decision.diagnosis is not None
            assert decision.diagnosis.cause is EndCause.NONFINITE_GRADIENT
            assert "the gradient norm is" in str(decision.diagnosis)


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_gradients_that_stay_not_finite_end_the_run() -> None:
    guards = Guards.default(can={"skip", "stop"})
    decisions = [guards.observe(batch(step), **{**LEARNT, "grad_norm": float("nan")}) for step in range(1, 6)]
    assert all(decision.skip for decision in decisions)
    assert [decision.stop for decision in decisions] == [False] * 4 + [True]


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_scaler_leaves_one_overflow_out_and_several_in_a_row_are_a_fault() -> None:
    guards = Guards.default(can={"skip", "stop"})

    def step(number: int, norm: float, scale: float) -> set[str]:
        return fired(guards.observe(batch(number), loss=0.3, grad_norm=norm, loss_scale=scale).events)

    assert step(1, float("inf"), 2048.0) == set()
    assert all(step(number, 0.5, 1024.0) == set() for number in range(2, 6))
    assert step(6, float("inf"), 2048.0) == set()
    seen = [step(number, float("inf"), 2048.0 / 2**number) for number in range(7, 22)]
    assert all("overflow" in guards_of_step for guards_of_step in seen)
    assert "overflow-dead" in seen[-1]
    assert not any("gradient-nonfinite" in guards_of_step for guards_of_step in seen)
    assert guards.diagnosis().cause is EndCause.FP16_DEAD


@pytest.mark.filterwarnings("ignore:guards that are off")
def test_a_later_update_of_a_step_is_judged_by_its_own_gradient() -> None:
    guards = Guards.default(can={"skip", "stop"})
    with pytest.raises(UsageError, match="call observe first"):
        guards.observe_update(grad_norm=0.5)
    assert not guards.observe(batch(1), **LEARNT).events
    assert not guards.observe_update(**LEARNT).events
    later = guards.observe_update(**{**LEARNT, "grad_norm": float("nan")})
    assert (fired(later.events), later.skip, later.step) == ({"gradient-nonfinite"}, True, 1)
    assert later.diagnosis is not None
    assert later.diagnosis.cause is EndCause.NONFINITE_GRADIENT


def test_what_the_loop_cannot_do_is_named() -> None:
    guards = Guards.default()
    with pytest.warns(UserWarning, match="guards that are off"):
        decision = guards.observe(batch(1, rewards=[np.nan] * RESPONSES))
    assert not decision.skip
    assert decision.gives_up
    assert [str(action) for action in decision.unsupported] == ["leave_out"]
    assert "not possible here: leave_out" in str(decision)


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
    ("can", "said"),
    [
        ("skip", r"can is one word, 'skip': give a set of actions, such as \{'skip'\}"),
        ({"skpi"}, "can names 'skpi', which is no action of guards; did you mean 'skip'"),
    ],
)
def test_a_misspelt_action_is_one_sentence(can: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Guards.default(can=can)


@pytest.mark.filterwarnings("ignore:guards that are off")
@pytest.mark.parametrize(("step", "said"), [(0, "step 0 is before the first"), (1.5, "step 1.5 is no whole number")])
def test_a_step_is_a_whole_number_from_one(step: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
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


def test_what_is_no_state_of_guards_is_refused() -> None:
    with pytest.raises(BrokenRecord, match="no state of guards"):
        Guards.default().load_state_dict({})


def test_a_misspelt_metric_is_not_laid_to_an_input_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "guards.toml"
    path.write_text('[[guard]]\nname = "mine"\nrule = "nonfinite"\nmetric = "mismatch/kl_k33"\nactions = ["stop"]')
    guards = Guards.from_file(path)
    with pytest.warns(UserWarning, match="guards that are off here"):
        guards.observe(batch(1))
    assert next(guard.lacks for guard in guards.explain() if guard.name == "mine") == ("metrics['mismatch/kl_k33']",)


def test_ranks_that_add_up_their_sums_decide_as_one() -> None:
    whole = batch(3, temperature=0.7)
    rows = []
    for rank in range(4):
        mine = slice(4 * rank, 4 * rank + 4)
        parts = {name: np.asarray(getattr(whole, name))[mine] for name in Batch.__dataclass_fields__}
        rows.append(Batch(**parts).measure().to_array())
    together, alone = Sums.of_arrays(rows).metrics(), whole.measure().metrics()
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        tolerance = 0.03 if name == "mismatch/temperature_fit" else 1e-9
        assert together[name] == pytest.approx(value, rel=tolerance, nan_ok=True), name


def test_a_rank_without_responses_changes_nothing() -> None:
    whole = batch(3).measure()
    nothing = Batch(np.zeros((0, 40)), np.zeros((0, 40)), np.zeros((0, 40))).measure()
    assert (whole + nothing).metrics() == pytest.approx(whole.metrics())
    assert nothing.metrics() == {}


def test_restored_guards_decide_as_those_that_were_not_interrupted() -> None:
    def run(*, interrupted: bool) -> list[str]:
        guards, said = Guards.default(can={"skip", "stop"}), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 12):
                spoiled = {"rewards": [np.nan] * RESPONSES} if step > 8 else {}
                said.append(str(guards.observe(batch(step, **spoiled), probe=probe(step), **LEARNT)))
                if interrupted and step == 9:
                    state = json.loads(json.dumps(guards.state_dict(), allow_nan=False))
                    guards = Guards.default(can={"skip", "stop"})
                    guards.load_state_dict(state)
        return said

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
    with pytest.raises(UsageError, match="the probe holds no token"):
        guards.observe(probe=[probe(40), Probe([], [])])


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
    with pytest.raises(UsageError, match="the probe holds no token"):
        guards.observe(probe=Probe([], []))


def test_a_batch_without_the_sampler_still_has_rewards_and_lengths() -> None:
    metrics = batch(1, log_mu=None).measure().metrics()
    assert {name.split("/")[0] for name in metrics} == {"reward", "response"}
    assert metrics["response/length_mean"] == batch(1).measure().metrics()["response/length_mean"]
    with pytest.raises(UsageError, match="says nothing of its tokens"):
        Batch(rewards=[1.0]).measure()


def test_a_column_of_values_and_prompts_of_chat_messages_say_the_same() -> None:
    whole = batch(1)
    columns = {
        "rewards": np.asarray(whole.rewards)[:, None],
        "truncated": np.asarray(whole.truncated)[:, None].astype(np.int64),
        "prompt_ids": [[{"role": "user", "content": f"task {prompt}"}] for prompt in whole.prompt_ids],
    }
    assert batch(1, **columns).measure() == whole.measure()


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
    with pytest.raises(UsageError, match="tells no prompt"):
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


def test_a_reward_whose_square_is_too_large_is_seen_and_breaks_nothing() -> None:
    guards = Guards.default(can={"skip"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(1, 13):
            guards.observe(batch(step))
        decision = guards.observe(batch(13, rewards=np.linspace(1e300, 2e300, RESPONSES)))
    assert "reward-scale" in fired(decision.events)
    assert decision.skip


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_arrays_that_do_not_fit_are_one_sentence(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        batch(1, **given).measure()
