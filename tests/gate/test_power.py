"""Gating simulated samples again and again: as rarely wrong as it says, and quick to fail what is worse."""

from collections import Counter

import pytest

from benchmarks.coverage import DESIGNS
from benchmarks.gate_power import ANY, PAIRED, Source, gated
from mismatch_probe.records.answers import CheckAnswer

REPEATS = 16
OVER_LIMIT = (0.95, 1.15, 1.3)
ONE_LOOK, EXTENDED = "256 sequences", "256, 512 and 1,024 sequences"
WATCHED = (
    ("abs_logprob_diff", ONE_LOOK),
    ("abs_logprob_diff, of four", ONE_LOOK),
    ("abs_logprob_diff, of four", EXTENDED),
    (ANY, ONE_LOOK),
    (ANY, EXTENDED),
    ("abs_logprob_diff", PAIRED),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[0, 4], ids=[DESIGNS[0].name, DESIGNS[4].name])
def shares(request: pytest.FixtureRequest) -> dict[tuple[str, str, float], dict[CheckAnswer, float]]:
    source = Source(DESIGNS[request.param].name, design=request.param)
    truths = source.truths(num_batches=8)
    answers: dict[tuple[str, str, float], Counter[CheckAnswer]] = {}
    for repeat in range(REPEATS):
        for key, answer in gated(source, truths, repeat, OVER_LIMIT).items():
            answers.setdefault(key, Counter())[answer] += 1
    return {key: {answer: count / REPEATS for answer, count in counts.items()} for key, counts in answers.items()}


def test_what_keeps_every_limit_does_not_fail(shares: dict[tuple[str, str, float], dict[CheckAnswer, float]]) -> None:
    for (watched, looks, over), answered in shares.items():
        if over == 0.95:
            assert answered.get("fail", 0.0) <= 0.05, (watched, looks)


@pytest.mark.parametrize(("watched", "looks"), WATCHED)
def test_what_is_worse_fails(
    watched: str, looks: str, shares: dict[tuple[str, str, float], dict[CheckAnswer, float]]
) -> None:
    assert shares[watched, looks, 1.15]["fail"] >= 0.8
    assert shares[watched, looks, 1.3]["fail"] >= 0.98


def test_what_is_worse_hardly_ever_passes(shares: dict[tuple[str, str, float], dict[CheckAnswer, float]]) -> None:
    for (watched, looks, over), answered in shares.items():
        if over > 1:
            assert answered.get("pass", 0.0) <= 0.05, (watched, looks, over)
