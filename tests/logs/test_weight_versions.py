"""Versions of the weights of a response's parts: every shape in which systems write them, and what is no such shape."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.row import Row
from mismatch_probe.logs.weight_versions import VersionChecks, has_several_versions, version_of, weight_spans
from mismatch_probe.records.log_readings import VersionReading
from mismatch_probe.records.sequences import LoggedResponse

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
    random = np.random.default_rng(seed)
    sizes = np.repeat([before, after], [12, 18]) * random.standard_normal(30)
    log_mu = -random.uniform(0.5, 2, 30)
    return LoggedResponse(
        where=f"line {seed}",
        prompt_token_ids=np.array([1], np.int32),
        token_ids=np.arange(30, dtype=np.int32),
        sampled=np.ones(30, np.bool_),
        log_mu=log_mu,
        log_pi=log_mu + sizes,
        weight_version=version_of(spans),
        weight_spans=spans,
    )


@pytest.mark.parametrize(("before", "is_changed"), [(0.3, True), (0.1, True), (0.05, False), (0.04, False)])
def test_the_level_where_recorded_versions_change_is_said_with_its_size(before: float, is_changed: bool) -> None:
    checks = VersionChecks()
    for seed in range(24):
        checks.add(response((("7", 12), ("8", 30)) if seed % 2 else (("8", 30),), before, 0.04, seed))
    reading = checks.reading()
    assert reading is not None
    assert (reading.num_mixed, reading.num_recorded, reading.mixed_share) == (12, 24, 0.5)
    assert reading.is_level_changed == is_changed
    assert reading.rms_before == pytest.approx(before, rel=0.3)
    [finding] = checks.findings()
    assert "the weights change within 12 of 24 responses" in finding.sentence
    assert ("no clear difference" in finding.sentence) == (not is_changed)


@dataclass(frozen=True)
class SureText:
    """Responses whose tokens are mostly sure, and ever more of them; the errors of rounding move logits by a hundredth,
    at sure tokens by more, and log-probs of one token in three are nearer to 0 than what stores them resolves.
    """

    times: float = 1.0
    """The level before the change over that after it."""
    growth: float = 1.0
    """Along the response."""
    change: int | None = None
    """Where the weights change; None: at a place of each response's own, in its middle half."""
    length: tuple[int, int] = (60, 120)
    turns_sure: bool = False
    """Behind the change, all at once."""
    equal_share: float = 0.0
    """Of tokens whose log-probs are equal bit for bit."""

    def response(self, seed: int) -> LoggedResponse:
        random = np.random.default_rng(seed)
        length = int(random.integers(*self.length))
        change = int(random.integers(length // 4, 3 * length // 4)) if self.change is None else self.change
        places = np.arange(length)
        unsure = 10 ** -random.uniform(0.3, 2 + 2 * places / length)
        if self.turns_sure:
            unsure = np.where(places < change, unsure, unsure * 0.03)
        sizes = 0.01 * np.where(places < change, self.times, 1.0) * self.growth ** (places / length)
        errors = sizes * unsure**0.6 * random.standard_normal(length)
        is_beyond = random.random(length) < 1 / 3
        unsure, errors = np.where(is_beyond, 1e-6, unsure), np.where(is_beyond, 1e-7, errors)
        errors[random.random(length) < self.equal_share] = 0
        log_mu = np.log1p(-unsure)
        return LoggedResponse(
            where=f"line {seed}",
            prompt_token_ids=np.array([1], np.int32),
            token_ids=np.arange(length, dtype=np.int32),
            sampled=np.ones(length, np.bool_),
            log_mu=log_mu,
            log_pi=np.minimum(log_mu + errors, -1e-9),
            weight_version="7-8",
            weight_spans=(("7", change), ("8", length)),
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


@pytest.mark.parametrize("equal_share", [0.0, 0.2])
@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_a_change_shows_in_a_text_whose_tokens_are_mostly_sure(times: float, equal_share: float) -> None:
    """The mean squares of all tokens hang on the few unsure ones, of which the beginnings have more."""
    reading = SureText(times, equal_share=equal_share).reading()
    assert reading.is_level_changed
    assert reading.times_before == pytest.approx(times, rel=0.4)


@pytest.mark.parametrize(
    "text",
    [
        *(SureText(growth=growth, change=change) for growth in (0.25, 4.0) for change in (None, 40)),
        SureText(turns_sure=True),
        SureText(length=(20, 30)),
    ],
    ids=str,
)
def test_a_text_that_grows_sure_and_rounding_that_grows_are_no_change(text: SureText) -> None:
    assert not any(text.reading(first=first).is_level_changed for first in range(0, 144, 24))


def test_few_short_responses_show_no_change_by_chance() -> None:
    text = SureText(length=(12, 16))
    assert not any(text.reading(8, first).is_level_changed for first in range(0, 240, 8))


def test_growth_that_sets_in_where_the_weights_change_is_no_change() -> None:
    """Among the tokens near the change it is small, in responses of thousands."""
    responses = []
    for seed in range(24):
        each = SureText(length=(4000, 4001), change=2000).response(seed)
        assert each.log_pi is not None
        assert each.log_mu is not None
        grown = (each.log_pi - each.log_mu) * np.interp(np.arange(4000), [2000, 3000], [1, 6])
        responses.append(replace(each, log_pi=np.minimum(each.log_mu + grown, -1e-9)))
    assert not reading_of(responses).is_level_changed


def test_a_difference_of_less_than_a_half_is_no_clear_one_however_sure() -> None:
    reading = SureText(1.3).reading(400)
    assert not reading.is_level_changed
    assert reading.times_before == pytest.approx(1.3, rel=0.1)


@pytest.mark.parametrize(("number", "is_changed"), [(7, False), (8, True)])
def test_a_change_takes_eight_responses(number: int, is_changed: bool) -> None:
    assert SureText(12.0).reading(number).is_level_changed == is_changed


def test_a_response_that_is_off_throughout_is_no_change() -> None:
    """One in three is, and its change is recorded late in it: what is compared is each response with itself."""
    usual, early = ([SureText(change=at).response(seed) for seed in range(24)] for at in (50, 10))
    off = [replace(each, log_pi=each.log_mu + 8 * (each.log_pi - each.log_mu)) for each in usual[1::3]]
    assert not reading_of([*off, *early[0::3], *early[2::3]]).is_level_changed


def test_a_log_of_single_versions_has_no_finding() -> None:
    checks = VersionChecks()
    for seed in range(24):
        checks.add(response((("8", 30),), 0.3, 0.04, seed))
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
