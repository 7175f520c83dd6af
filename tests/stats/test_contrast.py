import numpy as np
import pytest

from mismatch_probe.stats.estimator import Estimator, contrast, paired_contrast
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences
from tests.stats.pairs import gaussian_pair


def estimate(value: float, low: float | None, high: float | None, level: float = 0.95) -> Estimate:
    return Estimate(value, low, high, level, 10, 100, "token")


def test_twice_the_noise_is_four_times_the_divergence():
    twice, once = (pair_metrics(gaussian_pair(200, 100, sigma, seed))[0] for sigma, seed in ((0.02, 1), (0.01, 2)))
    ratio = contrast(twice["kl_k3"], once["kl_k3"])
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 4 < ratio.high
    assert ratio.low > 3.5


def test_what_both_have_in_common_widens_no_paired_ratio():
    random = np.random.default_rng(0)
    sequences = Sequences.of_lengths([50] * 20)
    second = sequences.spread(random.lognormal(0, 1, 20)) * random.lognormal(0, 0.1, 1000)
    first = 2 * second * random.lognormal(0, 0.1, 1000)
    paired = paired_contrast(sequences, first, second, 0.95)
    estimator = Estimator(sequences)
    apart = contrast(*(estimator.mean(values, "token", Scale.POSITIVE) for values in (first, second)))
    assert paired.low < 2.01 < paired.high
    assert paired.high / paired.low < 1.05
    assert apart.high / apart.low > 2
    assert paired_contrast(sequences, first, 0 * second, 0.95) is None


def test_a_certain_denominator_leaves_the_numerators_interval():
    ratio = contrast(estimate(4, 2, 12), estimate(2, 2, 2))
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 1, 6))


def test_turning_the_ratio_over_turns_its_interval_over():
    first, second = estimate(4, 2, 12), estimate(2, 1, 3)
    forth, back = contrast(first, second), contrast(second, first)
    assert forth is not None
    assert back is not None
    assert (1 / back.value, 1 / back.high, 1 / back.low) == pytest.approx((forth.value, forth.low, forth.high))  # type: ignore[operator]


def test_nothing_is_so_many_times_larger_than_zero():
    assert contrast(estimate(1, 0.5, 2), estimate(0, 0, 0)) is None


def test_a_bound_that_is_missing_leaves_a_ratio_without_interval():
    ratio = contrast(estimate(1, None, None), estimate(2, 1, 3))
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (0.5, None, None)


def test_levels_must_match():
    with pytest.raises(ValueError, match="levels"):
        contrast(estimate(1, 0.5, 2, 0.9), estimate(1, 0.5, 2, 0.95))


@pytest.mark.slow
def test_the_ratio_of_two_samples_holds_the_truth_about_95_times_in_100():
    held = 0
    for seed in range(300):
        samples = (gaussian_pair(64, 50, sigma, 2 * seed + k) for k, sigma in enumerate((0.02, 0.01)))
        ratio = contrast(*(pair_metrics(sample)[0]["kl_k2"] for sample in samples))
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= (0.02**2 + 0.02**4 / 4) / (0.01**2 + 0.01**4 / 4) <= ratio.high
    assert 0.92 <= held / 300 <= np.nextafter(0.99, 1)
