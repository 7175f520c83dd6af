"""What is shown and what is not, on residuals whose law is known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.explain.fitting import choose_for_log, choose_for_responses
from mismatch_probe.explain.judging import Account, Floats, Judge, LoggedTokens
from mismatch_probe.explain.search import LEAST_SCORES, is_drawn_to
from mismatch_probe.explain.sentences import grid_of, resolution
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.rounding import LEAST_NATS, Floor
from tests.explain.logs import logged

ROWS, LENGTH, UNIT = 40, 50, 0.02
RANDOM = np.random.default_rng(0)
TRUTH = -RANDOM.exponential(2.0, ROWS * LENGTH)
COLUMN = TRUTH + UNIT * RANDOM.normal(size=TRUTH.size)
TOKENS = LoggedTokens.of(
    logged([TokenSequence(str(row), [row], [0] * LENGTH) for row in range(ROWS)], mu=list(COLUMN.reshape(ROWS, LENGTH)))
)
JUDGE = Judge(COLUMN, np.zeros_like(COLUMN), TOKENS.rows, np.ones(COLUMN.size, dtype=np.bool_))


def account(predicted: Floats) -> Account:
    return Account(predicted, np.full_like(predicted, UNIT))


def test_rounding_is_one_floor_and_an_outlier_in_a_hundred_is_left_out() -> None:
    spoiled = TRUTH.copy()
    spoiled[:10] += 5
    assert JUDGE.floors(account(TRUTH)) == pytest.approx(1, abs=0.06)
    assert JUDGE.floors(account(spoiled)) == pytest.approx(1, abs=0.06)


def test_a_small_systematic_difference_is_shown_and_none_is_not() -> None:
    off = account(TRUTH * 1.005)
    assert JUDGE.standard_scores(account(TRUTH), off) > LEAST_SCORES
    assert JUDGE.standard_scores(off, account(TRUTH)) < 0
    assert JUDGE.standard_scores(account(TRUTH), account(TRUTH)) == 0
    assert JUDGE.explained_share(account(TRUTH), off) > 0.1


def test_an_account_far_below_rounding_is_shown_by_where_residuals_point() -> None:
    moved = 0.2 * UNIT * np.random.default_rng(1).normal(size=TRUTH.size)
    faulty = replace(JUDGE, column=COLUMN + moved)
    null, given = account(TRUTH), account(TRUTH + moved)
    assert faulty.explained_share(given, null) < 0.1
    assert faulty.drawn_to(given, null) > LEAST_SCORES
    assert faulty.drawn_to(null, given) < 2
    assert JUDGE.drawn_to(null, null) == 0


@pytest.mark.parametrize(("share", "is_named"), [(0.0, False), (0.5, False), (0.75, True), (1.0, True), (1.5, True)])
@pytest.mark.parametrize("times", [1, 8])
def test_a_long_log_whose_residuals_point_a_little_back_names_the_weights(
    share: float, is_named: bool, times: int
) -> None:
    """A side that lies `share` of the way from the null to the account, in logs of 2,000 and 16,000 tokens."""
    random = np.random.default_rng(3)
    size = times * TRUTH.size
    truth, moved = np.zeros(size), 0.25 * UNIT * random.normal(size=size)
    column = share * moved + UNIT * random.normal(size=size)
    judge = Judge(column, np.zeros(size), np.arange(size) // LENGTH, np.ones(size, dtype=np.bool_))
    assert is_drawn_to(judge, account(truth + moved), account(truth)) == is_named


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.2, 2.0])
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_rounding_points_to_no_account(size: float, rows: int) -> None:
    """Accounts of all tokens, and of the tokens of few responses."""
    random = np.random.default_rng(2)
    judge = replace(JUDGE, rows=JUDGE.rows % rows)
    few = JUDGE.rows < 4
    scores = [
        judge.drawn_to(account(TRUTH + size * UNIT * random.normal(size=TRUTH.size) * among), account(TRUTH))
        for among in (1.0, few)
        for _ in range(200)
    ]
    assert max(scores) < LEAST_SCORES


@pytest.mark.slow
def test_a_fit_to_noise_is_not_shown() -> None:
    """Two hundred accounts, each off at random: the best on one half is no better than the truth on the other."""
    noise = [account(TRUTH + 0.3 * UNIT * RANDOM.normal(size=TRUTH.size)) for _ in range(200)]
    assert JUDGE.standard_scores(choose_for_log(noise, JUDGE, TOKENS).account, account(TRUTH)) < LEAST_SCORES
    assert (
        JUDGE.standard_scores(choose_for_responses([account(TRUTH), *noise], JUDGE, TOKENS).account, account(TRUTH)) < 0
    )


def test_a_wide_unit_is_not_cheap() -> None:
    assert JUDGE.standard_scores(account(TRUTH), Account(TRUTH, np.full_like(TRUTH, 8 * UNIT))) > LEAST_SCORES


def test_the_floor_follows_the_probability() -> None:
    errors = UNIT * np.abs(TRUTH) * RANDOM.normal(size=TRUTH.size)
    floor = Floor.measure(errors, TRUTH, JUDGE.is_counted)
    likely, unlikely = floor.at(np.array([-0.1, -6.0]))
    assert likely < UNIT * 0.5 < UNIT * 3 < unlikely
    assert floor.at(np.array([-30.0])) == pytest.approx(floor.at(np.array([floor.least])) * -30 / floor.least)
    assert Floor.measure(np.zeros_like(TRUTH), TRUTH, JUDGE.is_counted).at(np.array([-2.0])) == LEAST_NATS


@pytest.mark.parametrize(("column", "least"), [(np.round(COLUMN, 3), 1e-3 / 12**0.5), (COLUMN, 0.0)])
def test_decimals_that_were_not_written_are_added(column: Floats, least: float) -> None:
    assert resolution(column, column) == pytest.approx(np.full_like(column, least))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_grid_of_64_log_probs_is_seen(dtype: type[np.floating[Any]]) -> None:
    """Those of an uncut FP32 log-softmax have none, though one so near to 0 is exact in FP16 too."""
    column = np.append(COLUMN[:63], -(2.0**-20)).astype(dtype).astype(np.float64)
    assert grid_of(column) == ("fp16" if dtype == np.float16 else None)


def test_one_response_with_a_large_gain_does_not_hide_that_all_gain() -> None:
    """Its gain alone makes the error of their sum as large as the sum."""
    rows = np.repeat(np.arange(40), 25)
    column = np.zeros(rows.size)
    judge = Judge(column, np.zeros_like(column), rows, np.ones(rows.size, dtype=np.bool_))
    worse, better = np.full(rows.size, 0.9), np.full(rows.size, 0.8)
    worse[:25] = 200.0
    accounts = [Account(predicted, np.ones(rows.size)) for predicted in (better, worse)]
    assert judge.standard_scores(accounts[0], accounts[1]) > 5
    assert judge.standard_scores(accounts[1], accounts[0]) < 0


def test_as_many_responses_that_lose_as_gain_tell_nothing() -> None:
    random = np.random.default_rng(0)
    rows = np.repeat(np.arange(40), 25)
    judge = Judge(random.normal(0, 1, rows.size), np.zeros(rows.size), rows, np.ones(rows.size, dtype=np.bool_))
    unit = np.ones(rows.size)
    scores = [
        judge.standard_scores(Account(random.normal(0, 0.1, rows.size), unit), Account(np.zeros(rows.size), unit))
        for _ in range(200)
    ]
    assert max(scores) < 2.5
