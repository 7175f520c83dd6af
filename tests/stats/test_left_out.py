"""How much of a sample lacks a log-prob: by number, and by the surprisal that its tokens have or may have."""

import numpy as np
import pytest

from mismatch_probe.stats.zeros import LeftOutTotals


def totals(log_pi: np.ndarray, log_mu: np.ndarray) -> LeftOutTotals:
    return LeftOutTotals.of(log_pi, log_mu, ~(np.isnan(log_pi) | np.isnan(log_mu)))


def test_a_token_that_one_side_has_counts_by_its_surprisal() -> None:
    log_pi, log_mu = np.array([-1.0, -1.0, -6.0]), np.array([-1.0, -1.0, np.nan])
    assert totals(log_pi, log_mu).share == pytest.approx(6 / 8)
    assert totals(log_mu, log_pi).share == pytest.approx(6 / 8)


def test_a_token_that_both_sides_lack_counts_as_the_most_surprising_one() -> None:
    log_pi = np.array([np.nan, -1.0, -1.0, -6.0])
    assert totals(log_pi, log_pi).share == pytest.approx(6 / 14)
    assert totals(log_pi, log_pi).of_surprisal == 0


def test_the_rarest_tokens_that_both_sides_lack_leave_too_little_for_a_pass() -> None:
    log_pi = -np.random.default_rng(0).exponential(1.0, (40, 125))
    rarest = np.argsort(log_pi, axis=1)[:, :4]
    np.put_along_axis(log_pi, rarest, np.nan, axis=1)
    lacking = totals(log_pi.ravel(), log_pi.ravel())
    assert lacking.out / lacking.tokens < 0.05
    assert not lacking.are_few


def test_one_token_in_two_thousand_that_both_sides_lack_is_few() -> None:
    log_pi = -np.random.default_rng(0).exponential(1.0, 2000)
    log_pi[77] = np.nan
    assert totals(log_pi, log_pi).are_few


def test_parts_add_up() -> None:
    first, second = np.array([np.nan, -1.0]), np.array([-1.0, -6.0])
    assert (totals(first, first) + totals(second, second)).share == pytest.approx(6 / 14)
