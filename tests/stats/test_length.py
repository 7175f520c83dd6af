import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy.linalg import toeplitz

from benchmarks.length_budget import measured_ess
from mismatch_probe.difference.versus import part_of
from mismatch_probe.stats.bins import PositionGrid, log_ends
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.length import length_law, shape_is_open
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.stats.spread import Errors, fit_spread
from tests.stats.pairs import clustered_pair, gaussian_pair, pair_with


def holds(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high


def fractional_pair(num_sequences: int, length: int, exponent: float, scale: float) -> TokenPair:
    """d is fractional Gaussian noise: alike at every position, and its sum has variance scale * t^exponent."""
    lag = np.arange(length + 1.0)
    variance = lag**exponent
    covariance = (variance[1:] - 2 * variance[:-1] + np.abs(lag[:-1] - 1) ** exponent) / 2
    root = np.linalg.cholesky(toeplitz(covariance))
    noise = np.random.default_rng(5).normal(size=(num_sequences, length)) @ root.T
    return pair_with(math.sqrt(scale) * noise.ravel(), np.full(num_sequences, length))


def pair_of_sizes(num_sequences: int, sizes: npt.NDArray[np.float64], seed: int = 0) -> TokenPair:
    """Independent errors whose standard deviation depends on the position alone."""
    noise = np.random.default_rng(seed).normal(size=(num_sequences, sizes.size)) * sizes
    return pair_with(noise.ravel(), np.full(num_sequences, sizes.size))


def first_tokens(pair: TokenPair, num_tokens: int) -> TokenPair:
    part = part_of(pair, position=(0, num_tokens))
    assert part is not None
    return part


def budget_of(pair: TokenPair, ess: float) -> Estimate | None:
    """The law's budget, without the rest of the law."""
    grid = PositionGrid(pair.sequences, np.array(log_ends(int(pair.sequences.lengths.max()))))
    return fit_spread(Estimator(pair.sequences), grid, Errors.of(grid, pair.diff), ess).budget


@pytest.mark.slow
def test_a_planted_drift_is_recovered():
    random = np.random.default_rng(0)
    lengths = random.integers(50, 800, 200)
    law = length_law(pair_with(random.normal(-1e-3, 0.02, lengths.sum()), lengths))
    assert holds(law.drift_per_1000, -1.0)


@pytest.mark.slow
def test_independent_errors_are_a_random_walk():
    law = length_law(gaussian_pair(400, 512, 0.05))
    assert holds(law.spread_exponent, 1.0)
    assert holds(law.spread_coefficient, 0.05**2)


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.7, 1.3, 1.7])
def test_a_planted_exponent_is_recovered(exponent: float):
    law = length_law(fractional_pair(500, 512, exponent, 1e-4))
    assert holds(law.spread_exponent, exponent)
    assert holds(law.spread_coefficient, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("growth", [-0.5, 0.5])
def test_errors_that_change_with_position_are_no_bias_of_the_response(growth: float):
    law = length_law(pair_of_sizes(500, 0.01 * np.arange(1.0, 513) ** growth))
    assert holds(law.spread_exponent, 1.0)


POSITION = np.arange(1.0, 2049)
SIZES = {
    "every position alike": np.full(2048, 0.012),
    "sure at first, worst at token 64, then steady": 0.02 * np.where(POSITION < 64, POSITION / 64, 0.6),
    "growing with the root of the position": 0.02 * np.sqrt(POSITION / 2048),
    "falling slowly": 0.02 * POSITION**-0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_start_of_the_responses_foretells_the_budget_of_long_ones(sizes: npt.NDArray[np.float64]):
    pair = pair_of_sizes(600, sizes)
    for num_tokens in (256, 512, 1024):
        start = first_tokens(pair, num_tokens)
        for ess in (0.95, 0.9, 0.85):
            truth = int(np.searchsorted(np.cumsum(sizes**2), -math.log(ess))) + 1
            if truth < 2048:
                assert holds(budget_of(start, ess), truth)


@pytest.mark.slow
def test_a_budget_within_the_data_is_where_the_effective_sample_is_measured():
    sizes = 0.05 * np.minimum(np.arange(1.0, 513) / 200, 1.0)
    for ess in (0.95, 0.8, 0.6):
        law = length_law(pair_of_sizes(1000, sizes), ess=ess)
        assert law.ess_at_budget is not None
        assert law.ess_at_budget.value == pytest.approx(ess, abs=0.03)


@pytest.mark.slow
def test_the_share_that_the_benchmark_measures_is_that_of_the_weights() -> None:
    pair = pair_of_sizes(64, np.full(40, 0.1))
    weights = np.exp(pair.diff.reshape(64, 40)[:, :30].sum(axis=1))
    share = measured_ess(pair, 30)
    assert share is not None
    assert share.value == pytest.approx(weights.sum() ** 2 / (weights.size * (weights**2).sum()), rel=1e-9)


def test_the_drawn_law_meets_the_asked_share_at_the_budget():
    for num_tokens in (200, 1500):
        law = length_law(pair_of_sizes(300, np.linspace(0.01, 0.03, num_tokens)))
        assert law.budget_tokens is not None
        lengths, shares = zip(*((point.num_tokens, point.ess) for point in law.fitted_ess), strict=True)
        assert list(shares) == sorted(shares, reverse=True)
        assert np.interp(law.budget_tokens.value, lengths, shares) == pytest.approx(law.budget_ess, abs=0.01)


def test_a_bias_of_each_sequence_spreads_with_the_square_of_length():
    bias = np.random.default_rng(0).normal(0, 0.01, 300)
    law = length_law(pair_with(np.repeat(bias, 256), np.full(300, 256)))
    assert law.spread_exponent is not None
    assert law.spread_exponent.value == pytest.approx(2, abs=1e-6)


@pytest.mark.slow
def test_the_budget_of_independent_errors_is_the_closed_form_and_keeps_half_the_sample():
    sigma = 0.05
    pair = gaussian_pair(2000, 512, sigma)
    law = length_law(pair)
    truth = math.log(2) / sigma**2
    assert holds(law.budget_tokens, truth)
    assert law.budget_tokens == budget_of(pair, 0.5)
    assert law.budget_closed_form is not None
    assert law.budget_closed_form.value == pytest.approx(truth, rel=0.05)
    assert law.ess_at_budget is not None
    assert law.ess_at_budget.value == pytest.approx(0.5, abs=0.06)
    assert not law.longest_budget_is_extrapolated


@pytest.mark.slow
def test_a_budget_from_short_responses_agrees_with_the_effective_sample_of_long_ones():
    short, long = gaussian_pair(1000, 128, 0.05, seed=1), gaussian_pair(1000, 512, 0.05, seed=2)
    law = length_law(short)
    assert law.budget_tokens is not None
    assert law.longest_budget_is_extrapolated
    assert law.ess_at_budget is None
    num_tokens = int(law.budget_tokens.value)
    sums = long.diff.reshape(1000, 512)[:, :num_tokens].sum(axis=1)
    weights = np.exp(sums)
    assert weights.sum() ** 2 / (1000 * (weights**2).sum()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow
def test_a_stricter_share_buys_a_shorter_budget():
    pair = gaussian_pair(300, 512, 0.05)
    half, most = length_law(pair, ess=0.5).budget_tokens, length_law(pair, ess=0.9).budget_tokens
    assert half is not None
    assert most is not None
    assert most.value < half.value


@pytest.mark.parametrize("are_alike", [True, False])
def test_the_interval_of_a_budget_that_was_not_fitted_holds_errors_that_are_alike_and_those_that_are_independent(
    are_alike: bool,
) -> None:
    """Six responses are too few for a fit; where errors are alike, the closed form is wrong by its square root."""
    alike = np.repeat(np.array([-1, 1, -1, 1, -1, 1]) * 1e-3, 256)
    truth = math.sqrt(math.log(2)) / 1e-3 if are_alike else math.log(2) / 0.02**2
    law = length_law(pair_with(alike if are_alike else gaussian_pair(6, 256, 0.02).diff, np.full(6, 256)))
    assert law.budget_tokens is None
    assert law.budget is not None
    assert law.budget_closed_form is not None
    assert law.budget.value == law.budget_closed_form.value
    assert holds(law.budget, truth)
    assert holds(law.budget_closed_form, truth) != are_alike
    assert law.is_extrapolated


@pytest.mark.parametrize("ess", [0.0, 1.0, -1.0])
def test_a_share_that_is_none_is_refused(ess: float):
    with pytest.raises(ValueError, match="between 0 and 1"):
        length_law(gaussian_pair(4, 8, 0.1), ess=ess)


def test_equal_log_probs_have_no_spread_and_say_so():
    law = length_law(pair_with(np.zeros(3200), np.full(32, 100)))
    assert law.spread_exponent is None
    assert law.budget_tokens is None
    assert law.budget_closed_form is None
    assert {"spread_exponent", "budget_tokens", "budget_closed_form"} <= set(law.unavailable)
    assert law.drift_per_1000 is not None
    assert law.drift_per_1000.value == 0


def test_too_few_responses_fit_nothing_and_say_why():
    law = length_law(gaussian_pair(8, 200, 0.1))
    assert law.spread_exponent is None
    assert "fewer than 16" in law.unavailable["spread_exponent"]
    assert law.abs_diff_by_position


def test_a_spread_that_does_not_grow_has_no_budget():
    paired = np.tile([1.0, -1.0], (64, 128)) * np.random.default_rng(0).choice([0.1, 0.3], (64, 1))
    law = length_law(pair_with(paired.ravel(), np.full(64, 256)))
    assert law.budget_tokens is None
    assert "budget_tokens" in law.unavailable


def test_every_token_lies_in_one_bin_of_position_and_one_of_response_length():
    pair = clustered_pair(40, seed=0)
    law = length_law(pair)
    for curve in (law.abs_diff_by_position, law.abs_diff_by_response_length):
        assert sum(part.mean.num_tokens for part in curve) == pair.sequences.num_tokens
        total = sum(part.mean.value * part.mean.num_tokens for part in curve)
        assert total == pytest.approx(pair.abs_diff.sum())
    assert law.measured_up_to == pair.sequences.lengths.max()


def test_the_last_point_of_the_cumulative_curve_is_the_sum_of_d():
    pair = gaussian_pair(32, 100, 0.1)
    last = length_law(pair).cumulative_diff_by_position[-1]
    assert last.center == 100
    assert last.mean.value == pytest.approx(pair.diff_sums.mean())


def test_deviation_that_grows_with_position_shows_in_the_curve():
    growing = np.tile(np.linspace(0.001, 0.1, 256), 32)
    curve = length_law(pair_with(growing, np.full(32, 256))).abs_diff_by_position
    means = [part.mean.value for part in curve]
    assert means == sorted(means)


def test_growth_that_is_only_confidence_vanishes_inside_its_bins():
    random = np.random.default_rng(0)
    position = np.tile(np.arange(256), 100)
    confident = random.random(position.size) < 1 - position / 300
    log_ref = np.where(confident, np.log(0.95), np.log(0.05))
    error = random.laplace(size=position.size) * np.where(confident, 0.001, 0.05)
    sequences = Sequences.of_lengths(np.full(100, 256))
    law = length_law(TokenPair(sequences, log_ref + error, log_ref, log_ref))
    first, last = (law.abs_diff_by_position[number].mean.value for number in (5, -1))
    assert last > 3 * first
    assert len(law.by_confidence) == 2
    for part in law.by_confidence:
        assert part.by == "reference_probability"
        first, last = (part.abs_diff_by_position[number].mean.value for number in (3, -1))
        assert last == pytest.approx(first, rel=0.3)


def test_entropy_makes_curves_of_its_own():
    pair = clustered_pair(20, seed=0)
    entropy = np.random.default_rng(0).exponential(size=pair.sequences.num_tokens)
    law = length_law(TokenPair(pair.sequences, pair.log_pi, pair.log_mu, entropy_pi=entropy))
    assert {part.by for part in law.by_confidence} == {"inference_probability", "entropy_nats"}


@pytest.mark.slow
def test_the_order_of_sequences_changes_no_law():
    pair = clustered_pair(40, seed=0)
    order = np.random.default_rng(0).permutation(40)
    tokens = np.concatenate([np.arange(*pair.sequences.offsets[i : i + 2]) for i in order])
    moved = TokenPair(Sequences.of_lengths(pair.sequences.lengths[order]), pair.log_pi[tokens], pair.log_mu[tokens])
    first, second = length_law(pair), length_law(moved)
    for name in ("drift_per_1000", "spread_exponent", "budget_tokens"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert ours.value == pytest.approx(theirs.value)
        assert ours.high == pytest.approx(theirs.high)


@pytest.mark.parametrize("times_beyond", [1.0, 1.3, 1.5, 2.0, 4.0])
def test_whether_the_shape_is_open_does_not_depend_on_the_level_of_the_intervals(times_beyond: float) -> None:
    sequences = Sequences.of_lengths(np.ones(64, dtype=int))
    sums = np.random.default_rng(3).normal(size=64)
    answers = {shape_is_open(Estimator(sequences, level), sums, 0.9, times_beyond) for level in (0.6, 0.95, 0.999)}
    assert len(answers) == 1
