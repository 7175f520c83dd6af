"""Exact zeros: those of an engine that is sure are log-probs, those for what was not recorded are not."""

import numpy as np
import pytest

from benchmarks.zeros import draw, shares
from mismatch_probe.stats.zeros import NearlySure, filled_with_zeros, sides_without_zeros, zeros_for_missing

SURE, UNSURE = -0.01, -2.0
AGREEING = NearlySure(tokens=100, below=0)


def response(*parts: tuple[int, float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Values and the other side's log-probs, of stretches of so many tokens."""
    values, others = (np.concatenate([np.full(part[0], part[side]) for part in parts]) for side in (1, 2))
    return values, others


def test_zeros_of_tokens_that_the_other_side_is_sure_of_are_log_probs() -> None:
    assert not filled_with_zeros(*response((40, 0.0, SURE), (10, -1.0, UNSURE)), AGREEING).any()


def test_a_response_of_zeros_is_filled_where_the_other_side_is_unsure_of_three() -> None:
    two, three = response((28, 0.0, SURE), (2, 0.0, UNSURE)), response((27, 0.0, SURE), (3, 0.0, UNSURE))
    assert not filled_with_zeros(*two, AGREEING).any()
    assert filled_with_zeros(*three, AGREEING).all()


def test_a_stretch_of_zeros_is_judged_apart_from_the_other_zeros_of_its_response() -> None:
    values, others = response((20, 0.0, SURE), (1, -1.0, -1.0), (17, 0.0, UNSURE), (1, -1.0, -1.0), (5, 0.0, SURE))
    assert np.flatnonzero(filled_with_zeros(values, others, AGREEING)).tolist() == list(range(21, 38))


def test_a_single_deviation_at_a_zero_is_measured() -> None:
    values, others = response((600, 0.0, SURE), (2, 0.0, -9.0))
    assert not zeros_for_missing(values, others, np.array([0, 300, 602])).any()


def test_zeros_that_are_refuted_all_over_a_log_are_all_missing() -> None:
    values, others = response(*[(1, 0.0, UNSURE), (9, -1.0, -1.0), (1, 0.0, SURE)] * 12)
    assert np.array_equal(zeros_for_missing(values, others, np.arange(13) * 11), values == 0)


def test_zeros_throughout_are_missing_by_the_first_that_is_refuted() -> None:
    offsets = np.array([0, 20])
    assert zeros_for_missing(*response((19, 0.0, SURE), (1, 0.0, UNSURE)), offsets).all()
    assert not zeros_for_missing(*response((20, 0.0, SURE)), offsets).any()


def test_each_side_is_judged_by_the_other() -> None:
    values, others = response((20, 0.0, UNSURE), (20, -1.0, -1.1))
    first, second = sides_without_zeros(values, others, np.array([0, 20, 40]))
    assert (np.isnan(first).sum(), np.isnan(second).sum()) == (20, 0)
    second, first = sides_without_zeros(others, values, np.array([0, 20, 40]))
    assert (np.isnan(first).sum(), np.isnan(second).sum()) == (20, 0)


@pytest.mark.parametrize("top_p", [0.98, 0.9, 0.5, None])
def test_of_drawn_logs_filled_responses_are_caught_and_no_honest_zero_is_lost(top_p: float | None) -> None:
    """At 2.0 and at 0.5 nats; of a tenth of a nat only long responses tell."""
    for sureness, length, least in ((0.5, 30, 0.99), (2.5, 100, 0.9)):
        drawn = draw(np.random.default_rng(1), (40, length), sureness, top_p)
        assert (drawn.log_mu == 0).any()
        caught, lost = shares(drawn, 2)
        assert (caught >= least, lost) == (True, 0.0)


@pytest.mark.parametrize("top_p", [0.98, 0.5, None])
@pytest.mark.parametrize("error", [1.0, 3.0])
def test_no_honest_zero_is_lost_where_the_other_side_has_other_weights(error: float, top_p: float | None) -> None:
    for sureness in (0.5, 2.5):
        drawn = draw(np.random.default_rng(1), (40, 100), sureness, top_p, error)
        assert (drawn.log_mu == 0).any()
        assert shares(drawn, 1)[1] == 0


def test_a_response_of_zeros_is_caught_beside_other_weights() -> None:
    drawn = draw(np.random.default_rng(1), (40, 100), 0.5, 0.98, 1.0)
    assert shares(drawn, 2)[0] == 1


def test_few_zeros_that_deviate_as_all_tokens_do_are_measured() -> None:
    random = np.random.default_rng(0)
    values = -random.exponential(1.0, 2000)
    values[[50, 700, 1200, 1900]] = 0.0
    others = values - random.uniform(0, 3, 2000)
    assert not zeros_for_missing(values, others, np.arange(21) * 100).any()
