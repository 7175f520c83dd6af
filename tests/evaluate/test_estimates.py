"""Accuracy under pi from responses of mu, against policies whose accuracy is known exactly."""

from dataclasses import dataclass

import numpy as np
import pytest

from mismatch_probe.evaluate.estimates import Answers, ReweightedAccuracy, accuracy, accuracy_difference, reweight
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats

LENGTH = 6


@dataclass(frozen=True)
class Coins:
    """Responses of `LENGTH` tokens, each 1 with its policy's probability; right where the tokens' sum is even.

    E[(-1)^sum] = (1 - 2p)^LENGTH, so accuracy is (1 + (1 - 2p)^LENGTH) / 2.
    """

    mu: float
    pi: float

    def exact(self, probability: float) -> float:
        return (1 + (1 - 2 * probability) ** LENGTH) / 2

    @property
    def gap(self) -> float:
        return self.exact(self.pi) - self.exact(self.mu)

    @property
    def ess(self) -> float:
        """1 / E_mu[w^2], a product over independent tokens."""
        second_moment = self.pi**2 / self.mu + (1 - self.pi) ** 2 / (1 - self.mu)
        return float(second_moment**-LENGTH)

    def sample(self, num_problems: int, each: int, seed: int) -> tuple[Answers, Floats]:
        """Responses of mu, and the sum of log pi - log mu of each."""
        tokens = np.random.default_rng(seed).random((num_problems * each, LENGTH)) < self.mu
        ones = np.log(self.pi / self.mu)
        zeros = np.log((1 - self.pi) / (1 - self.mu))
        log_ratio = np.where(tokens, ones, zeros).sum(axis=1)
        rewards = (tokens.sum(axis=1) % 2 == 0).astype(np.float64)
        problems = np.repeat(np.arange(num_problems), each)
        return Answers(rewards, np.full(rewards.size, LENGTH), problems), log_ratio


COINS = Coins(mu=0.15, pi=0.12)


def present(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


def bounds(estimated: Estimate | None) -> tuple[float, float]:
    estimate = present(estimated)
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def share_covered(truth: float, estimates: list[Estimate | None]) -> float:
    return float(np.mean([low <= truth <= high for low, high in map(bounds, estimates)]))


@pytest.fixture(scope="module")
def repeated() -> list[ReweightedAccuracy]:
    return [reweight(*COINS.sample(150, 2, seed), 0.95) for seed in range(400)]


def test_accuracy_under_pi_and_the_gap_are_recovered() -> None:
    answers, log_ratio = COINS.sample(20_000, 1, seed=0)
    estimated = reweight(answers, log_ratio, 0.95)
    assert accuracy(answers, 0.95).value == pytest.approx(COINS.exact(COINS.mu), abs=0.01)
    assert present(estimated.under_pi).value == pytest.approx(COINS.exact(COINS.pi), abs=0.01)
    assert present(estimated.gap).value == pytest.approx(COINS.gap, abs=0.01)
    assert present(estimated.ess).value == pytest.approx(COINS.ess, abs=0.02)
    assert estimated.undecided is None


def test_intervals_hold_the_exact_values_as_often_as_they_say(repeated: list[ReweightedAccuracy]) -> None:
    assert share_covered(COINS.gap, [estimated.gap for estimated in repeated]) > 0.92
    assert share_covered(COINS.exact(COINS.pi), [estimated.under_pi for estimated in repeated]) > 0.92


def test_the_estimate_is_unbiased_within_its_noise(repeated: list[ReweightedAccuracy]) -> None:
    gaps = np.array([present(estimated.gap).value for estimated in repeated])
    assert abs(gaps.mean() - COINS.gap) < 4 * gaps.std() / np.sqrt(gaps.size)


def test_the_paired_interval_is_narrower_than_two_independent_ones() -> None:
    answers, log_ratio = COINS.sample(2_000, 1, seed=1)
    estimated = reweight(answers, log_ratio, 0.95)
    low, high = bounds(estimated.gap)
    apart = np.hypot(np.ptp(bounds(accuracy(answers, 0.95))), np.ptp(bounds(estimated.under_pi)))
    assert high - low < 0.6 * apart


def test_weights_turned_upside_down_are_seen() -> None:
    answers, log_ratio = COINS.sample(20_000, 1, seed=2)
    _, high = bounds(reweight(answers, -log_ratio, 0.95).gap)
    assert high < 0 < COINS.gap


def test_the_same_policy_on_both_sides_has_exactly_no_gap() -> None:
    answers, log_ratio = Coins(mu=0.15, pi=0.15).sample(100, 2, seed=3)
    estimated = reweight(answers, log_ratio, 0.95)
    assert present(estimated.gap).value == 0
    assert present(estimated.ess).value == 1
    assert present(estimated.under_pi).value == accuracy(answers, 0.95).value


def test_policies_too_far_apart_give_a_reason_and_no_number() -> None:
    far = Coins(mu=0.15, pi=0.45)
    estimated = reweight(*far.sample(2_000, 1, seed=4), 0.95)
    assert far.ess < 0.1
    assert estimated.under_pi is None
    assert estimated.gap is None
    assert estimated.undecided is not None
    assert estimated.undecided == "weights pi/mu leave 4 % of the responses, fewer than 50 %"


def test_responses_that_all_earned_the_same_cannot_bound_a_gap() -> None:
    answers, log_ratio = COINS.sample(50, 1, seed=5)
    estimated = reweight(Answers(np.ones(50), answers.lengths, answers.problems), log_ratio, 0.95)
    gap = present(estimated.gap)
    assert (gap.value, gap.low, gap.high) == (0, None, None)
    low, high = bounds(estimated.under_pi)
    assert low < 0.95
    assert high == 1


def test_rewards_that_are_no_shares_are_averaged() -> None:
    answers, log_ratio = COINS.sample(20_000, 1, seed=6)
    graded = Answers(3 * answers.rewards - 1, answers.lengths, answers.problems)
    assert accuracy(graded, 0.95).value == pytest.approx(3 * accuracy(answers, 0.95).value - 1)
    plain, scaled = (present(reweight(rewarded, log_ratio, 0.95).gap) for rewarded in (answers, graded))
    assert scaled.value == pytest.approx(3 * plain.value)


def test_samples_of_one_problem_are_one_observation() -> None:
    rng = np.random.default_rng(7)
    solvable = np.repeat(rng.random(100) < 0.5, 8).astype(np.float64)
    lengths = np.full(800, 5)
    clustered = Answers(solvable, lengths, np.repeat(np.arange(100), 8))
    apart = Answers(solvable, lengths, np.arange(800))
    assert np.ptp(bounds(accuracy(clustered, 0.95))) > 2 * np.ptp(bounds(accuracy(apart, 0.95)))


def test_a_difference_pairs_what_answers_the_same_problem() -> None:
    rng = np.random.default_rng(8)
    hardness = np.repeat(rng.random(200), 4)
    problems = np.repeat(np.arange(200), 4)
    lengths = np.full(800, 5)
    first = Answers((rng.random(800) < hardness).astype(float), lengths, problems)
    second = Answers((rng.random(800) < 0.8 * hardness).astype(float), lengths, problems)
    difference = accuracy_difference(first, second, 0.95)
    assert difference.value == pytest.approx(first.rewards.mean() - second.rewards.mean())
    low, high = bounds(difference)
    assert low < 0.1 < high
    apart = np.hypot(*(np.ptp(bounds(accuracy(side, 0.95))) for side in (first, second)))
    assert high - low < 0.9 * apart


def test_answers_to_other_problems_are_not_set_against_each_other() -> None:
    first = Answers(np.ones(2), np.ones(2, dtype=int), np.array([0, 1]))
    second = Answers(np.ones(2), np.ones(2, dtype=int), np.array([0, 2]))
    with pytest.raises(ValueError, match="different problems"):
        accuracy_difference(first, second, 0.95)
