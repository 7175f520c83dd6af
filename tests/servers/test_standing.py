"""Two answers to the question that is asked again and again."""

import pytest

from mismatch_probe.engines.server.answers import Candidates, other_answer


@pytest.mark.parametrize(
    ("now", "departs"),
    [
        ({1: -0.5, 2: -1.0}, None),
        ({1: -0.59, 2: -1.0}, None),
        ({1: -0.61, 2: -1.0}, "by 0.11 nats, where its own noise allows 0.1"),
        ({2: -1.0, 3: -4.0}, None),
        ({3: -0.5}, "with other tokens"),
        ({}, None),
    ],
)
def test_an_answer_is_another_beyond_what_is_bearable(now: Candidates, departs: str | None) -> None:
    before = {1: -0.5, 2: -1.0}
    assert other_answer(before, now, bearable=0.1) == departs
    assert other_answer(now, before, bearable=0.1) == departs
