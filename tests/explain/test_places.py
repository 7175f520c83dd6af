"""A side that lies apart from the checkpoint at places of the context is named by it, and a side that rounds is not."""

from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Context, checkpoint_alone
from mismatch_probe.explain.judging import Floats, Judge, LoggedTokens
from mismatch_probe.explain.predictions import floors_of_formats
from mismatch_probe.explain.search import SideBench, search
from mismatch_probe.explain.sentences import verdict_of
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.summary import Verdict
from mismatch_probe.stats.rounding import Floor
from tests.explain.logs import logged
from tests.explain.test_search import KnownPredictions

ROUNDING, TOKENS = 0.02, 80
"""Nats by which an unsure token is off."""
LENGTHS = np.array([60 + 7 * (row % 4) for row in range(16)])
PLACES = np.concatenate([length + np.arange(TOKENS) for length in LENGTHS])


def verdict(times: Floats | np.ndarray, seed: int, side: Any = "pi") -> Verdict:
    """On a side that is off by rounding, and by so many times as much [T]; no hypothesis is tried."""
    random = np.random.default_rng(seed)
    exact = -random.exponential(1.5, PLACES.size)
    errors, others = ROUNDING * (1 - np.exp(exact)) * random.normal(size=(2, PLACES.size))
    sequences = [
        TokenSequence(str(row), random.integers(0, 99, length).tolist(), [1] * TOKENS)
        for row, length in enumerate(LENGTHS)
    ]
    column, everywhere = exact + times * errors, np.ones(PLACES.size, dtype=np.bool_)
    tokens = LoggedTokens.of(logged(sequences, mu=list(column.reshape(-1, TOKENS))))
    predictions: Any = KnownPredictions({"as logged": exact}, {"as logged": others})
    bench = SideBench(
        side=side,
        judge=Judge(column, np.zeros(PLACES.size), tokens.rows, everywhere),
        as_declared=Distribution(temperature=1.0),
        dtype=Dtype.BF16,
        floors=floors_of_formats({Dtype.BF16: Floor.measure(others, exact, everywhere)}),
        errors={},
        predictions=predictions,
        tokens=tokens,
        weights=checkpoint_alone(len(LENGTHS)),
        context=Context.as_logged(tokens),
        tell=lambda text, seconds_left: None,
    )
    return verdict_of(bench, search(bench, []), 0, PLACES.size)


@pytest.mark.parametrize(("side", "who"), [("pi", "The training path's side (pi)"), ("mu", "The engine's side (mu)")])
@pytest.mark.parametrize("times", [5.0, 100.0])
def test_a_period_is_named_with_its_places_and_its_side(times: float, side: str, who: str) -> None:
    found = verdict(np.where(PLACES % 16 == 5, times, 1.0), 0, side)
    assert (found.kind, found.code) == ("bug", Code.PERIOD)
    assert found.sentence.startswith(f"{who} errs once in every 16 places of the context, at 5")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("times", [5.0, 100.0])
def test_a_step_is_named_with_its_place(times: float, seed: int) -> None:
    found = verdict(np.where(PLACES >= 110, times, 1.0), seed)
    assert (found.kind, found.code) == ("bug", Code.ONSET)
    named = int(found.sentence.split("departs from place ")[1].split()[0])
    assert abs(named - 110) <= 3


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["alike", "grows", "heavy tails"])
def test_a_side_that_rounds_has_no_place(kind: str, seed: int) -> None:
    times = {
        "alike": np.ones(PLACES.size),
        "grows": 1 + 2 * (PLACES - PLACES.min()) / np.ptp(PLACES),
        "heavy tails": np.abs(np.random.default_rng(seed).standard_t(3, PLACES.size)),
    }[kind]
    assert Code.PERIOD != verdict(times, seed).code != Code.ONSET


def test_a_side_that_is_off_throughout_is_unexplained() -> None:
    assert verdict(np.full(PLACES.size, 30.0), 0).code == Code.UNEXPLAINED
