"""Versions of the weights of a response's parts: every shape in which systems write them, and what is no such shape."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import weight_versions
from mismatch_probe.logs.row import Row
from mismatch_probe.logs.weight_versions import VersionChecks, has_several_versions, version_of, weight_spans
from mismatch_probe.records.log_readings import VersionReading
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.sequences import Floats

SHAPES = {
    "one a token": ["7", "7", "7", "8", "8"],
    "whole numbers": [7, 7, 7, 8, 8],
    "objects": [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 5}],
    "lists": [["7", 0, 3], ["8", 3, 5]],
    "starts alone": [[7, 0], [8, 3]],
    "a tool between them": [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 3, "end": 5}],
    "an empty part": [["6", 0, 0], ["7", 0, 3], ["8", 3, 5]],
    "of calls": [
        {"spans": [{"version": "7", "abs_start": 4, "abs_end": 7}]},
        {"spans": [{"version": "8", "abs_start": 7, "abs_end": 9}]},
    ],
}


def spans_of(value: Any) -> Any:
    return weight_spans(Row("line 1", {"weight_versions": value}), "weight_versions", 5, num_before=4)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_parts(shape: str) -> None:
    assert spans_of(SHAPES[shape]) == (("7", 3), ("8", 5))


def test_one_version_throughout_is_one_part() -> None:
    assert spans_of([["7", 0, 2], ["7", 2, 5]]) == (("7", 5),)
    assert version_of((("7", 5),)) == "7"
    assert version_of((("7", 3), ("8", 5))) == "7-8"
    assert version_of(None, "9") == "9"


@pytest.mark.parametrize("nothing", [None, []])
def test_nothing_recorded_is_no_part(nothing: Any) -> None:
    assert spans_of(nothing) is None


@pytest.mark.parametrize(
    "wrong", ["7", [["7"]], [{"version": "7"}], [["7", -1]], [["7", 3], ["8", 1]], [[None, 0]], [["7", 0.5]], 7]
)
def test_what_is_no_such_shape_is_refused_with_its_place(wrong: Any) -> None:
    with pytest.raises(UsageError, match="line 1: "):
        spans_of(wrong)


def response(spans: Any, before: float, after: float, seed: int) -> LoggedResponse:
    """Tokens of -log p between 0.5 and 2, 40 before the change and 30 behind it."""
    random = np.random.default_rng(seed)
    sizes = np.repeat([before, after], [40, 30]) * random.standard_normal(70)
    log_mu = -random.uniform(0.5, 2, 70)
    return LoggedResponse(
        where=f"line {seed}",
        prompt_token_ids=np.full(100, seed, np.int32),
        token_ids=np.arange(70, dtype=np.int32),
        sampled=np.ones(70, np.bool_),
        log_mu=log_mu,
        log_pi=log_mu + sizes,
        weight_version=version_of(spans),
        weight_spans=spans,
    )


@pytest.mark.parametrize(("before", "is_changed"), [(0.3, True), (0.15, True), (0.05, False), (0.04, False)])
def test_the_level_where_recorded_versions_change_is_said_with_its_size(before: float, is_changed: bool) -> None:
    checks = VersionChecks()
    for seed in range(24):
        checks.add(response((("7", 40), ("8", 70)) if seed % 2 else (("8", 70),), before, 0.04, seed))
    reading = checks.reading()
    assert reading is not None
    assert (reading.num_mixed, reading.num_recorded, reading.mixed_share) == (12, 24, 0.5)
    assert reading.is_level_changed == is_changed
    assert reading.rms_before == pytest.approx(before, rel=0.3)
    assert reading.times_before == pytest.approx(before / 0.04, rel=0.3)
    [finding] = checks.findings()
    assert "the weights change within 12 of 24 responses" in finding.sentence
    assert ("no clear difference" in finding.sentence) == (not is_changed)
    assert ("times as large before the last change as after it" in finding.sentence) == is_changed


def test_a_rise_is_said_the_other_way_round() -> None:
    checks = VersionChecks()
    for seed in range(24):
        checks.add(response((("7", 40), ("8", 70)), 0.03, 0.3, seed))
    assert "times as large after the last change as before it" in next(checks.findings()).sentence


@dataclass(frozen=True)
class SureText:
    """Responses whose tokens are mostly sure, and ever more of them; rounding moves logits by a hundredth, at sure
    tokens by more, and log-probs of one token in three are nearer to 0 than what stores them resolves.
    """

    times: float = 1.0
    """The level before the change over that after it."""
    change: int | None = None
    """Where the weights change; None: at a place of each response's own, in its middle half."""
    length: tuple[int, int] = (80, 140)
    growth: Callable[[Floats], Any] = np.ones_like
    """Of d along the places of the response."""
    spread: float = 0.0
    """Of the logarithm of the level of each part of each response."""
    surest: float = 2.0
    """Nines of the surest tokens at the beginning; half of those at the end."""
    turns_sure: bool = False
    """Behind the change, all at once."""
    equal_share: float = 0.0
    """Of tokens whose log-probs are equal bit for bit."""
    decimals: int = 12
    """Of the stored log-probs."""
    num_prompts: int = 5000
    prompt: int = 1000
    """Its tokens."""
    tool: int = 0
    """Tokens that a tool writes at the change, along which d grows in proportion to the context."""
    older: int = 0
    """Tokens before the last version but one, of a version that is eight times as far off."""

    def response(self, seed: int) -> LoggedResponse:
        random = np.random.default_rng(seed)
        length = int(random.integers(*self.length))
        change = int(random.integers(length // 4, 3 * length // 4)) if self.change is None else self.change
        places = np.arange(length)
        unsure = 10 ** -random.uniform(0.3, self.surest + self.surest * places / length)
        if self.turns_sure:
            unsure = np.where(places < change, unsure, unsure * 0.03)
        sizes = 0.01 * np.where(places < change, self.times, 1.0) * self.growth(places.astype(np.float64))
        by_tool = np.where(places < change, 1, 1 + self.tool / (self.prompt + places))
        own = np.exp(self.spread * random.standard_normal(2))[(places >= change).astype(np.int64)]
        sizes = sizes * np.where(places < self.older, 8, 1) * by_tool * own
        errors = sizes * unsure**0.6 * random.standard_normal(length)
        is_beyond = random.random(length) < 1 / 3
        unsure, errors = np.where(is_beyond, 1e-6, unsure), np.where(is_beyond, 1e-7, errors)
        errors[random.random(length) < self.equal_share] = 0
        log_mu = np.log1p(-unsure)
        log_pi = np.minimum(log_mu + errors, -1e-9)
        gap = [change] * self.tool
        versions = [("6", self.older)] if self.older else []
        return LoggedResponse(
            where=f"line {seed}",
            prompt_token_ids=np.full(self.prompt, seed % self.num_prompts, np.int32),
            token_ids=np.zeros(length + self.tool, dtype=np.int32),
            sampled=np.insert(np.ones(length, np.bool_), gap, False),
            log_mu=np.insert(log_mu.round(self.decimals), gap, np.nan),
            log_pi=np.insert(log_pi.round(self.decimals), gap, np.nan),
            weight_version="7-8",
            weight_spans=(*versions, ("7", change), ("8", length + self.tool)),
        )

    def reading(self, number: int = 24, first: int = 0) -> VersionReading:
        return reading_of(self.response(seed) for seed in range(first, first + number))


def reading_of(responses: Iterable[LoggedResponse]) -> VersionReading:
    checks = VersionChecks()
    for each in responses:
        checks.add(each)
    reading = checks.reading()
    assert reading is not None
    return reading


def first_eight(places: Floats) -> Floats:
    return np.where(places < 8, 8.0, 1.0)


def right_before_place_2000(places: Floats) -> Floats:
    return np.where((places >= 1930) & (places < 2000), 5.0, 1.0)


def twenty(places: Floats) -> Floats:
    return np.full_like(places, 20)


def with_the_context(places: Floats) -> Floats:
    return (20 + places) / 20


def along_the_middle(places: Floats) -> Floats:
    return np.interp(places, [50, 150], [1.0, 4.0])


@pytest.mark.parametrize("equal_share", [0.0, 0.2])
@pytest.mark.parametrize("times", [3.5, 1 / 3.5])
def test_a_change_shows_in_a_text_whose_tokens_are_mostly_sure(times: float, equal_share: float) -> None:
    """The mean squares of all tokens hang on the few unsure ones, of which the beginnings have more."""
    reading = SureText(times, equal_share=equal_share).reading(40)
    assert reading.is_level_changed
    assert reading.times_before == pytest.approx(times, rel=0.4)


@pytest.mark.parametrize(
    "text",
    [
        SureText(turns_sure=True),
        SureText(turns_sure=True, decimals=4),
        SureText(length=(20, 30)),
        SureText(growth=with_the_context, prompt=20, length=(60, 70)),
        SureText(growth=first_eight, change=20),
        SureText(growth=along_the_middle, change=100, length=(200, 201)),
        SureText(tool=3000),
        SureText(1.3),
    ],
    ids=("turns-sure", "decimals", "short", "context", "first-eight", "growth-near-it", "tool", "small"),
)
def test_what_a_sound_text_and_rounding_that_grows_show_is_no_change(text: SureText) -> None:
    assert not any(text.reading(100, first).is_level_changed for first in (0, 100, 200))


def test_eight_responses_show_a_larger_deviation_before_the_change() -> None:
    readings = [SureText(2.5, length=(90, 120)).reading(8, first) for first in range(0, 120, 8)]
    assert all(reading.is_level_changed for reading in readings)


def test_rounding_that_grows_along_few_short_responses_is_no_change() -> None:
    """Behind a long prompt the context tells nothing of it."""
    text = SureText(growth=lambda places: 1 + places / 25, prompt=1000, length=(40, 60))
    assert not any(text.reading(12, first).is_level_changed for first in range(0, 600, 12))


@pytest.mark.parametrize("length", [(1, 2), (2, 3), (3, 4)])
def test_of_responses_too_short_for_a_level_none_is_given(length: tuple[int, int]) -> None:
    checks = VersionChecks()
    for seed in range(300):
        checks.add(SureText(length=length, change=1).response(seed))
    reading = checks.reading()
    assert reading is not None
    assert (reading.times_before, reading.is_level_changed) == (None, False)
    sentence = next(checks.findings()).sentence
    assert ("too few responses have the length on both sides" in sentence) == (reading.rms_before is not None)


def test_an_older_version_does_not_count_as_the_last_but_one() -> None:
    times = SureText(older=30, change=60, length=(120, 121)).reading(100).times_before
    assert times == pytest.approx(1, rel=0.2)


def test_what_lies_far_from_the_change_is_not_compared() -> None:
    """Further back the sides lie together."""
    text = SureText(growth=right_before_place_2000, change=2000, length=(4000, 4001))
    assert text.reading(40).is_level_changed


def test_parts_with_few_tokens_that_show_a_level_do_not_count() -> None:
    assert SureText(change=12).reading(100).times_before is None


def test_where_most_log_probs_are_equal_nothing_is_clear() -> None:
    assert SureText(6.0, equal_share=0.4).reading(100).is_level_changed
    assert not SureText(6.0, equal_share=0.7).reading(100).is_level_changed


def test_where_a_tool_writes_all_that_is_near_nothing_is_clear() -> None:
    """None of the nearest tokens behind the change was sampled, so that growth cannot be told from a step."""
    reading = SureText(20.0, tool=40).reading(100)
    assert reading.times_before is not None
    assert not reading.is_level_changed


def test_few_responses_show_no_change_by_chance() -> None:
    text = SureText(spread=0.5)
    assert not any(text.reading(8, first).is_level_changed for first in range(0, 240, 8))


@pytest.mark.parametrize(("number", "is_changed"), [(7, False), (8, True)])
def test_a_change_takes_eight_responses(number: int, is_changed: bool) -> None:
    assert SureText(20.0, change=50).reading(number).is_level_changed == is_changed


@pytest.mark.parametrize(("num_prompts", "is_changed"), [(1, False), (3, False), (4, True)])
def test_a_change_takes_four_prompts(num_prompts: int, is_changed: bool) -> None:
    """The responses to one may share most of their tokens."""
    assert SureText(20.0, change=50, num_prompts=num_prompts).reading(80).is_level_changed == is_changed


def test_copies_of_a_response_make_no_change_sure() -> None:
    text = SureText(num_prompts=5, spread=0.5)
    logs = ([text.response(seed) for seed in range(5 * log, 5 * log + 5)] * 20 for log in range(6))
    assert not any(reading_of(log).is_level_changed for log in logs)


def test_a_response_that_is_off_throughout_is_no_change() -> None:
    """Two in three are off, and unsure; the others turn sure at the change."""
    sound = [SureText(turns_sure=True, surest=1.0).response(seed) for seed in range(100)]
    unsure = SureText(growth=twenty, surest=0.5, change=100, length=(200, 201))
    off = [unsure.response(seed) for seed in range(200)]
    assert not reading_of([*off, *sound]).is_level_changed


def test_a_change_in_the_later_part_of_a_long_log_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_versions, "_MOST_RESPONSES", 50)
    times = reading_of(SureText(1.0 if seed < 50 else 8.0).response(seed) for seed in range(150)).times_before
    assert times is not None
    assert times > 2


def test_a_log_of_single_versions_has_no_finding() -> None:
    checks = VersionChecks()
    for seed in range(24):
        checks.add(response((("8", 70),), 0.3, 0.04, seed))
    assert not list(checks.findings())
    assert checks.reading() is not None
    assert not VersionChecks().reading()


def test_a_range_without_places_counts_as_several() -> None:
    several = response(None, 0.1, 0.1, 0)
    assert not has_several_versions(several)
    checks = VersionChecks()
    object.__setattr__(several, "weight_version", "7-8")
    checks.add(several)
    assert "is not recorded" in next(iter(checks.findings())).sentence
