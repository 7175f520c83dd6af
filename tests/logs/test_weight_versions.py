"""Versions of the weights of a response's parts: every shape in which systems write them, and what is no such shape."""

from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.row import Row
from mismatch_probe.logs.weight_versions import VersionChecks, has_several_versions, version_of, weight_spans
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
