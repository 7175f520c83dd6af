import numpy as np
import pytest

from mismatch_probe.stats.worst_responses import worst_responses
from tests.stats.pairs import pair_with

LENGTHS = [100, 10, 50, 40]


def four_responses() -> np.ndarray:
    """One that drifts, one that deviates everywhere but cancels, one with a single bad token, one that is fine."""
    return np.concatenate(
        [np.full(100, 0.02), np.tile([0.1, -0.1], 5), np.where(np.arange(50) == 7, -0.9, 0.0), np.zeros(40)]
    )


def test_each_way_of_being_worst_has_its_response():
    worst = worst_responses(pair_with(four_responses(), LENGTHS), 3)
    assert [response.row for response in worst] == [0, 2, 1]


def test_a_response_says_its_weight_its_means_and_its_worst_token():
    by_row = {response.row: response for response in worst_responses(pair_with(four_responses(), LENGTHS), 4)}
    assert by_row[0].log_weight == pytest.approx(2.0)
    assert by_row[1].mean_abs_diff == pytest.approx(0.1)
    assert by_row[1].log_weight == pytest.approx(0.0)
    assert by_row[2].worst == 7
    assert by_row[2].largest_abs_diff == pytest.approx(0.9)
    assert by_row[2].kl_k3 == pytest.approx((np.exp(-0.9) + 0.9 - 1) / 50)
    assert by_row[2].num_tokens == 50


@pytest.mark.parametrize("count", [1, 3, 9])
def test_there_are_never_more_than_asked_for_or_than_there_are(count: int):
    rows = [response.row for response in worst_responses(pair_with(four_responses(), LENGTHS), count)]
    assert len(rows) == len(set(rows)) == min(count, 4)
