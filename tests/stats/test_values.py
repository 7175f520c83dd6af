"""Values without intervals are those that the intervals stand around, bit for bit."""

import numpy as np
import pytest

from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.stats.values import metric_values
from tests.stats.pairs import clustered_pair, gaussian_pair


def overflowing() -> TokenPair:
    return TokenPair(Sequences.of_lengths([2, 2]), np.zeros(4), np.array([-800.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    "pair",
    [
        clustered_pair(8, seed=1),
        gaussian_pair(64, 20, 0.5),
        gaussian_pair(3, 5, 1e-9),
        clustered_pair(1, seed=2),
        overflowing(),
        TokenPair(Sequences.of_lengths([4]), -np.ones(4), -np.ones(4)),
    ],
    ids=["clustered", "gaussian", "tiny", "one sequence", "overflowing", "equal"],
)
def test_they_are_the_values_of_the_estimates(pair: TokenPair) -> None:
    estimates, _ = pair_metrics(pair)
    assert metric_values(pair) == {name: estimate.value for name, estimate in estimates.items()}


def test_no_interval_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an interval was made")

    monkeypatch.setattr("mismatch_probe.stats.estimator.jackknife", refuse)
    assert metric_values(clustered_pair(8, seed=1))
