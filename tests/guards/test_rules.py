"""Each rule family against what it is defined to be."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.guards.rules import parse_guards
from mismatch_probe.guards.rules.base import Guard
from mismatch_probe.guards.rules.mean import MeanSettings, newest_means


def rule(kind: str, **parameters: Any) -> Guard:
    """A rule as a guard file declares it."""
    table = {"name": "g", "rule": kind, "actions": ["log"], **parameters}
    return parse_guards({"defaults": False, "guard": [table]}, "guards.toml")[0].start()


def breaks(started: Guard, values: Sequence[float]) -> list[bool]:
    return [started.judge({"m": value}) is not None for value in values]


def test_a_limit_is_kept_at_the_limit_and_broken_beyond_it() -> None:
    assert breaks(rule("limit", metric="m", above=2, below=1), [0.99, 1, 1.5, 2, 2.01]) == [
        True,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("kind", ["limit", "growth", "cusum", "nonfinite"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_keeps_no_rule(kind: str, value: float) -> None:
    parameters = {"limit": {"above": 1}, "growth": {"ratio": 2}, "cusum": {"spread": 1}, "nonfinite": {}}[kind]
    assert breaks(rule(kind, metric="m", **parameters), [1, value, 1]) == [False, True, False]


def test_growth_compares_the_newest_with_the_median_before_it() -> None:
    assert breaks(rule("growth", metric="m", ratio=3, reference=3), [1, 2, 100, 4.4, 4.6]) == [
        False, False, True, False, False,
    ]  # fmt: skip


def test_growth_does_not_get_used_to_a_fault() -> None:
    assert breaks(rule("growth", metric="m", ratio=10, reference=4), [1] * 4 + [50] * 20) == [False] * 4 + [True] * 20


def test_growth_takes_the_canary_for_the_level_before_the_first_step() -> None:
    started = rule("growth", metric="m", ratio=10)
    started.judge_canary({"m": 1.0})
    assert breaks(started, [11.0]) == [True]


def test_growth_has_no_ratio_to_zero() -> None:
    assert breaks(rule("growth", metric="m", ratio=10), [0, 0, 5, 6, 100]) == [False, False, False, False, True]


def test_growth_below_its_least_is_no_breach() -> None:
    assert breaks(rule("growth", metric="m", ratio=10, least=1), [0.01, 0.01, 0.01, 0.9, 1.1]) == [False] * 4 + [True]


def test_a_fall_is_judged_on_the_median_of_its_window() -> None:
    fall = rule("growth", metric="m", direction="down", ratio=2, window=3, reference=4, least=0.2)
    values = [0.8, 0.8, 0.8, 0.8, 0.1, 0.8, 0.8, 0.3, 0.3, 0.3]
    assert breaks(fall, values) == [False] * 8 + [True, True]


def test_a_run_that_recovers_is_judged_by_its_newest_steps() -> None:
    fall = rule("growth", metric="m", direction="down", ratio=2, window=3, reference=4, least=0.2)
    values = [0.8] * 6 + [0.1] * 4 + [0.8, 0.7, 0.8, 0.8]
    assert breaks(fall, values) == [False] * 7 + [True] * 4 + [False] * 3


def test_the_median_that_a_fall_reports_is_of_the_newest_steps() -> None:
    fall = rule("growth", metric="m", direction="down", ratio=2, window=3, reference=4, least=0.2)
    breaks(fall, [0.8] * 6 + [0.0] * 3)
    assert [breach.value for value in (0.25, 0.375, 0.25) if (breach := fall.judge({"m": value}))] == [0.0, 0.25, 0.25]


def test_a_level_does_not_learn_what_a_breach_rested_on() -> None:
    """Three incidents of low values, with no more than the window between them, leave the level where it was."""
    fall = rule("growth", metric="m", direction="down", ratio=2, window=3, reference=4)
    incident = [0.1] * 6 + [0.8] * 3
    breaks(fall, [0.8] * 6 + 3 * incident)
    assert breaks(fall, [0.39, 0.39, 0.39]) == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("responses", [4, 16, 64])
def test_a_fall_within_the_error_of_its_means_is_no_breach(responses: int) -> None:
    """Rewards of 0 and 1 with a level of a half that does not move: without errors the rule takes noise for a fall."""
    random = np.random.default_rng(responses)
    means = random.binomial(responses, 0.5, (50, 100)) / responses
    fall = {"metric": "m", "direction": "down", "ratio": 2, "window": 3, "least": 0.2}
    error = np.sqrt(means * (1 - means) / responses)
    runs = list(zip(means, error, strict=True))
    steps_of_runs = [broken_steps(rule("growth", **fall, error="e"), *run) for run in runs]
    assert sum(steps_of_runs) <= 5
    if responses == 4:
        assert sum(broken_steps(rule("growth", **fall), *run) for run in runs) > 100


@pytest.mark.parametrize("responses", [4, 16, 64])
def test_a_collapse_beyond_the_error_of_its_means_is_a_breach(responses: int) -> None:
    means = np.r_[np.random.default_rng(responses).binomial(responses, 0.5, 30) / responses, np.zeros(20)]
    error = np.sqrt(means * (1 - means) / responses)
    fall = rule("growth", metric="m", direction="down", ratio=2, window=3, least=0.2, error="e")
    broken = [fall.judge({"m": value, "e": one}) is not None for value, one in zip(means, error, strict=True)]
    assert not any(broken[:30])
    assert broken.index(True) < 30 + {4: 10, 16: 4, 64: 3}[responses]
    assert all(broken[40:])


def broken_steps(started: Guard, means: Sequence[float], errors: Sequence[float]) -> int:
    return sum(started.judge({"m": value, "e": one}) is not None for value, one in zip(means, errors, strict=True))


def test_a_collapse_in_the_first_steps_is_seen_by_their_errors_although_it_is_a_part_of_their_spread() -> None:
    """As measured at a learning rate of 1e-3: the reward was gone after three updates."""
    started = rule("growth", metric="m", error="e", direction="down", ratio=2, window=3, reference=16, least=0.2)
    falls = [(0.625, 0.106), (0.406, 0.163), (0.312, 0.123), *[(0.0, 0.0)] * 6]
    broken = [started.judge({"m": mean, "e": error}) is not None for mean, error in falls]
    assert broken.index(True) <= 6


def test_an_error_that_is_not_known_is_that_of_the_other_steps() -> None:
    fall = rule("growth", metric="m", direction="down", ratio=2, window=2, error="e")
    for _ in range(6):
        assert fall.judge({"m": 0.8, "e": math.nan}) is None
    assert [fall.judge({"m": 0.1, "e": 0.5}) is not None for _ in range(2)] == [False, False]
    assert [fall.judge({"m": 0.1, "e": 0.01}) is not None for _ in range(20)][-1]


def test_a_level_that_never_was_high_cannot_fall() -> None:
    fall = rule("growth", metric="m", direction="down", ratio=2, least=0.2)
    assert breaks(fall, [0.2, 0.01]) == [False, False]


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_a_level_that_falls_counts_what_is_not_above_zero(low: float) -> None:
    """One prompt a step that is solved by all its responses or by none: the mean of a policy that does not move."""
    fall = rule("growth", metric="m", error="e", direction="down", ratio=2, window=3, reference=16, least=0.2)
    random = np.random.default_rng(0)
    means = np.where(random.random(1000) < 0.5, 1.0, low).tolist()
    assert broken_steps(fall, means, [math.nan] * 1000) <= 20


@pytest.mark.slow
@given(
    values=st.lists(st.floats(0.01, 100), min_size=6, max_size=40),
    k=st.floats(0, 2),
    h=st.floats(0.5, 6),
    direction=st.sampled_from(["up", "down"]),
    scale=st.sampled_from(["log", "raw"]),
)
def test_cusum_is_pages_recursion_on_the_standardised_metric(
    values: list[float], k: float, h: float, direction: str, scale: str
) -> None:
    found = breaks(rule("cusum", metric="m", k=k, h=h, window=5, spread=0.3, direction=direction, scale=scale), values)
    seen = np.log(values) if scale == "log" else np.asarray(values)
    level = np.median(seen[:5])
    z = (seen[5:] - level) / max(1.4826 * np.median(np.abs(seen[:5] - level)), 0.3)
    expected, total = [False] * 5, 0.0
    for one in z if direction == "up" else -z:
        total = max(0.0, total + one - k)
        expected.append(bool(total > h))
        total = 0.0 if total > h else total
    assert found == expected


def test_cusum_sees_a_shift_that_no_single_step_shows() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 1, 40)
    values = [*noise[:20], *(noise[20:] + 1.5)]
    cusum = breaks(rule("cusum", metric="m", scale="raw", spread=1, window=20), values)
    assert not any(cusum[:20])
    assert any(cusum[20:30])
    assert not any(breaks(rule("limit", metric="m", above=4), values))


def test_a_logarithm_is_taken_of_at_least_the_least() -> None:
    assert breaks(rule("cusum", metric="m", spread=1, window=2, least=1e-6), [0, 0, 1e-6]) == [False] * 3


def test_a_floor_is_the_first_canarys() -> None:
    started = rule("floor", metric="m", times=10, least=0.5)
    assert started.judge_canary({"m": 1.0}) is None
    assert breaks(started, [9, 10, 11]) == [False, False, True]
    assert started.judge_canary({"m": 11.0}) is not None
    assert breaks(started, [11]) == [True]


def test_a_floor_far_below_the_least_counts_as_the_least() -> None:
    started = rule("floor", metric="m", times=10, least=0.5)
    started.judge_canary({"m": 0.0})
    assert breaks(started, [0.5, 0.6]) == [False, True]


def test_a_canary_that_is_no_number_is_a_breach_and_leaves_the_floor_to_the_first_number() -> None:
    started = rule("floor", metric="m", times=10)
    assert started.judge_canary({"m": math.nan}) is not None
    assert breaks(started, [math.nan, 1.0, 9.0, 11.0]) == [True, False, False, True]


def floor_of_few() -> Guard:
    return rule("floor", metric="m", error="e", times=100, least=1e-6)


def of_one_token(value: float) -> dict[str, float]:
    """A step whose value is one token's, so that its error is as large."""
    return {"m": value, "e": value}


def test_a_floor_of_a_canary_without_an_uncertain_token_is_not_known_yet() -> None:
    """As a policy that is sure gives it in small steps: without errors the second step breaks it."""
    started = floor_of_few()
    started.judge_canary(of_one_token(1e-9))
    steps = [1e-9, 1e-5, 6e-5, 1e-8, 3e-6, 4e-5, 1e-6, 2e-5] * 4
    assert not any(started.judge(of_one_token(value)) for value in steps)


def test_a_fault_in_small_steps_is_added_up_until_it_shows() -> None:
    started = floor_of_few()
    started.judge_canary(of_one_token(1e-5))
    assert not any(started.judge(of_one_token(value)) for value in [1e-5, 2e-5, 5e-6] * 6)
    faulty = [started.judge(of_one_token(value)) for value in [1e-2, 2e-2, 5e-3] * 6]
    first = next(number for number, breach in enumerate(faulty, start=1) if breach is not None)
    assert 3 <= first <= 8
    assert all(faulty[first:])
    assert faulty[-1] is not None
    assert "on average over" in faulty[-1].sentence
    assert started.judge(of_one_token(1e-5)) is None, "a step that is fixed is no breach"


def test_a_fault_in_a_large_step_shows_at_once() -> None:
    started = floor_of_few()
    started.judge_canary({"m": 1e-5, "e": 1e-6})
    assert started.judge({"m": 1.1e-3, "e": 1e-4}) is None
    assert started.judge({"m": 2e-3, "e": 1e-4}) is not None


def test_a_level_of_too_few_steps_is_not_held_against_what_comes() -> None:
    assert breaks(rule("growth", metric="m", ratio=10), [1e-6, 1]) == [False, True]
    assert breaks(rule("growth", metric="m", ratio=10, needs=4), [1e-6, 1, 1, 1, 1]) == [False] * 5
    assert breaks(rule("growth", metric="m", ratio=10, needs=4), [1, 1, 1, 1, 11]) == [False] * 4 + [True]


DEAD = {"loss": 0.0, "grad_norm": 0.0, "other": 1.0, "reward": math.nan}


@pytest.mark.parametrize(
    "alive", [{"loss": 1e-30}, {"grad_norm": math.nan}, {"other": 0.0}, {"reward": 0.0}], ids=lambda alive: min(alive)
)
def test_a_flatline_needs_every_sign(alive: dict[str, float]) -> None:
    started = rule("flatline", zero=["loss", "grad_norm"], nonzero=["other"], nonfinite=["reward"])
    assert started.judge(DEAD) is not None
    assert started.judge({**DEAD, **alive}) is None


@pytest.mark.parametrize(("share", "broken"), [(0.89, False), (0.9, True), (1.0, True), (math.nan, False)])
def test_a_flatline_may_ask_for_a_least_value(share: float, broken: bool) -> None:
    started = rule("flatline", zero=["grad_norm"], at_least={"share": 0.9})
    found = started.judge({"grad_norm": 0.0, "share": share})
    assert (found is not None) == broken
    assert started.judge({"grad_norm": 0.1, "share": share}) is None


def test_sentences_give_the_numbers() -> None:
    assert sentence("limit", [0.0331], above=0.015) == "m is 0.0331, above its limit of 0.0150"
    assert sentence("limit", [-0.2], below=0) == "m is -0.200, below its limit of 0"
    assert sentence("nonfinite", [math.nan]) == "m is NaN"
    assert sentence("growth", [1e-4, 2e-3], ratio=10) == "m is 0.00200, above 0.00100, the most allowed after 1.00e-4"
    assert "2 after a level of 1 at the start" in sentence("cusum", [1, 1, 2], spread=0.1, window=2, h=1)


def sentence(kind: str, values: list[float], **parameters: Any) -> str:
    started = rule(kind, metric="m", **parameters)
    found = [started.judge({"m": value}) for value in values][-1]
    assert found is not None
    return found.sentence


def means(values: list[float], error: float = 1.0, **changes: Any) -> list[bool]:
    rule = MeanSettings(name="mean", metric="m", error="e", actions=["log"], **changes).start()
    return [rule.judge({"m": value, "e": error}) is not None for value in values]


def beyond(usual: Sequence[float], most: Sequence[float], **changes: Any) -> list[bool]:
    started = rule("beyond", metric="m", most="x", ratio=10, reference=3, **changes)
    return [started.judge({"m": value, "x": highest}) is not None for value, highest in zip(usual, most, strict=True)]


def test_what_is_usual_is_held_against_the_most_there_was() -> None:
    assert beyond([1, 1, 1, 11, 11], [1, 1, 1, 11, 11]) == [False, False, False, True, True]
    rare = beyond([0.1, 0.1, 0.2, 0.3, 9, 9], [0.1, 0.1, 10, 0.1, 10, 10])
    assert rare == [False] * 6
    assert beyond([0, 0, 50, 50], [0, 0, 50, 50]) == [False] * 4
    assert beyond([1, 1, 1, 1, 11], [9, 1, 1, 1, 11]) == [False] * 4 + [True]
    assert beyond([1, math.nan], [1, math.inf]) == [False, True]


def test_few_earlier_steps_are_held_to_a_ratio_of_their_own() -> None:
    scaled = [0.0, 1, 90, 9001, 9001, 1, 901]
    assert beyond(scaled, scaled, early_ratio=100) == [False, False, False, True, True, False, True]
    assert beyond([1, 101, 1], [1, 101, 1], early_ratio=100) == [False, True, False]
    assert beyond([1, 101, 1], [1, 101, 1]) == [False] * 3


def test_the_most_of_a_few_steps_is_not_held_against_what_comes() -> None:
    assert beyond([0.01, 1, 1, 1, 11], [0.01, 1, 1, 1, 11]) == [False] * 4 + [True]
    assert beyond([0.01, 0, 0, 0.01, 1, 1], [0.01, 0, 0, 0.01, 1, 1]) == [False] * 6


def test_a_mean_is_judged_by_the_standard_error_of_the_steps_that_it_is_taken_over() -> None:
    assert means([2.0] * 8, errors=5) == [False] * 7 + [True]
    assert means([6.0], errors=5) == [True]
    assert means([-6.0], errors=5) == [True]
    assert means([6.0], errors=5, tolerance=1.5) == [False]
    assert means([2.0] * 40, errors=5, window=4) == [False] * 40
    assert means([math.nan], errors=5) == [True]


@pytest.mark.slow
def test_a_mean_that_is_as_expected_is_hardly_ever_broken() -> None:
    random = np.random.default_rng(0)
    runs = [means(list(random.standard_normal(100))) for _ in range(100)]
    assert sum(map(any, runs)) <= 1


def test_a_mean_is_taken_over_numbers_of_steps_that_grow_by_the_fourth_root_of_two() -> None:
    steps_tried = [steps for steps, *_ in newest_means([[0.0, 1.0]] * 40)]
    assert steps_tried == [1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16, 19, 22, 26, 32, 38]
    assert [steps for steps, *_ in newest_means([[0.0, 1.0]] * 3)] == [1, 2]
    assert list(newest_means([])) == []


def test_a_mean_says_how_small_a_change_it_sees() -> None:
    settings = MeanSettings(name="mean", metric="m", error="e", actions=["log"], tolerance=0.5, window=16)
    words = "m, where it is 5.50 from 0 in one step like the last, 1.75 in 16"
    assert settings.sees({"m": 0.0, "e": 1.0}) == words
    assert settings.sees({"m": 0.0}) == settings.sees({"m": 0.0, "e": math.nan}) == ""


def test_a_mean_goes_on_from_its_state() -> None:
    settings = MeanSettings(name="mean", metric="m", error="e", actions=["log"])
    first, second = settings.start(), settings.start()
    for _ in range(7):
        assert first.judge({"m": 2.0, "e": 1.0}) is None
    second.restore(json.loads(json.dumps(first.state())))
    breach = second.judge({"m": 2.0, "e": 1.0})
    assert breach is not None
    assert breach.steps == 8
