"""The effective share of log-normal weights, whose truth is exp(-s^2), in samples that miss the largest of them."""

import numpy as np
import pytest

from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, squared_variation
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair

REPEATS = 400
TRUE_SHARES = (0.5, 0.3)
SAMPLES = ((64, 1), (8, 8), (256, 1))


def estimator(num_prompts: int, samples: int) -> Estimator:
    total = num_prompts * samples
    return Estimator(Sequences.of_lengths(np.ones(total, dtype=int), np.arange(total) // samples), level=0.95)


def log_weights(true_share: float, size: int, random: np.random.Generator) -> Floats:
    variance = -np.log(true_share)
    return random.normal(-variance / 2, np.sqrt(variance), size)


def interval(given: Estimator, log_ratios: Floats) -> tuple[float, float]:
    share = given.effective_share(log_ratios, "sequence")
    assert share is not None
    assert share.low is not None
    assert share.high is not None
    assert 0 <= share.low <= share.value <= share.high <= 1
    return share.low, share.high


@pytest.mark.slow
@pytest.mark.parametrize("true_share", TRUE_SHARES)
@pytest.mark.parametrize(("num_prompts", "samples"), SAMPLES)
def test_the_interval_holds_the_truth_at_least_93_times_in_100(
    num_prompts: int, samples: int, true_share: float
) -> None:
    random, given = np.random.default_rng(num_prompts), estimator(num_prompts, samples)
    intervals = np.array(
        [interval(given, log_weights(true_share, num_prompts * samples, random)) for _ in range(REPEATS)]
    )
    low, high = intervals.T
    assert np.mean((low <= true_share) & (true_share <= high)) >= 0.93
    assert np.mean(low > true_share) <= 0.025 + 3 * np.sqrt(0.025 * 0.975 / REPEATS)


@pytest.mark.parametrize("true_share", TRUE_SHARES)
@pytest.mark.parametrize(("num_prompts", "samples"), [(64, 1), (8, 8)])
def test_the_weights_alone_would_be_too_sure(num_prompts: int, samples: int, true_share: float) -> None:
    random, given = np.random.default_rng(1), estimator(num_prompts, samples)
    too_large = 0
    for _ in range(REPEATS):
        weights = np.exp(log_weights(true_share, num_prompts * samples, random))
        columns = [given.counts("sequence"), *(given.totals(w, "sequence") for w in (weights - 1, (weights - 1) ** 2))]
        variation = given.smooth(squared_variation, columns, "sequence", Scale.WEIGHTS)
        assert variation is not None
        assert variation.high is not None
        too_large += 1 / (1 + variation.high) > true_share
    assert too_large / REPEATS > 0.06


@pytest.mark.parametrize("num_prompts", [1, 2, 3])
def test_hardly_any_prompt_says_hardly_anything(num_prompts: int) -> None:
    share = estimator(num_prompts, 4).effective_share(
        np.random.default_rng(0).normal(0, 1, 4 * num_prompts), "sequence"
    )
    assert share is not None
    if num_prompts == 1:
        assert (share.low, share.high) == (None, None)
    else:
        assert share.low is not None
        assert share.high is not None
        assert share.low < 0.05 < share.high <= 1


def test_equal_weights_leave_everything_for_sure() -> None:
    share = estimator(16, 1).effective_share(np.full(16, -0.3), "sequence")
    assert share is not None
    assert (share.low, share.value, share.high) == (1, 1, 1)


def test_an_uncorrected_rule_has_the_share_of_the_metric() -> None:
    random = np.random.default_rng(0)
    log_mu = np.full(640, -2.0)
    pair = TokenPair(Sequences.of_lengths(np.full(32, 20)), log_mu + random.normal(0, 0.2, 640), log_mu)
    corrected = next(rule.ess_seq for rule in simulate_corrections(pair) if rule.name == "sequence_weight")
    share = pair_metrics(pair)[0]["ess_seq"]
    assert corrected is not None
    assert (corrected.low, corrected.value, corrected.high) == pytest.approx((share.low, share.value, share.high))
