import numpy as np
import pytest

from mismatch_probe.difference.versus import (
    TracedEstimate,
    part_of,
    second_minus_first,
    second_over_first,
    traced_metrics,
    without_trace,
)
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair


def pair(seed: int, num_sequences: int = 100, scale: float = 0.01, first_cluster: int = 0) -> TokenPair:
    random = np.random.default_rng(seed)
    lengths = random.integers(10, 60, num_sequences)
    sequences = Sequences.of_lengths(lengths, np.arange(num_sequences) + first_cluster)
    scales = sequences.spread(scale * random.lognormal(0, 0.5, num_sequences))
    log_mu = -0.2 - random.exponential(0.5, sequences.num_tokens)
    ids = random.integers(0, 3, sequences.num_tokens)
    return TokenPair(
        sequences,
        log_pi=log_mu + scales * random.normal(size=sequences.num_tokens),
        log_mu=log_mu,
        top1_pi=ids,
        top1_mu=np.where(random.random(ids.size) < 0.1, ids + 1, ids),
        entropy_pi=random.random(ids.size),
    )


def bounds(estimate: Estimate | None) -> tuple[float, float]:
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def test_traced_metrics_are_the_metrics() -> None:
    sample = pair(0)
    for level in (0.9, 0.95):
        traced, missing = traced_metrics(sample, level)
        known, same_missing = pair_metrics(sample, level)
        assert {name: without_trace(estimate) for name, estimate in traced.items()} == known
        assert missing == same_missing


def test_a_traced_metric_at_another_level_is_that_of_the_other_level() -> None:
    sample = pair(0)
    known = pair_metrics(sample, 0.5)[0]
    for name, estimate in traced_metrics(sample, 0.95)[0].items():
        if isinstance(estimate, TracedEstimate):
            assert estimate.at(0.5) == known[name]


@pytest.mark.parametrize("name", ["abs_logprob_diff", "ess_seq", "prob_pearson", "top1_flip", "abs_logprob_diff_p99"])
def test_a_run_against_itself_is_one_times_as_large(name: str) -> None:
    metrics, _ = traced_metrics(pair(0))
    ratio = second_over_first(metrics[name], metrics[name], 0.95)
    assert ratio is not None
    assert ratio.value == pytest.approx(1)


def test_the_same_tokens_leave_no_sampling_noise_in_the_ratio() -> None:
    sample = pair(0)
    twice = TokenPair(sample.sequences, log_pi=sample.log_mu + 2 * sample.diff, log_mu=sample.log_mu)
    old, new = traced_metrics(sample)[0], traced_metrics(twice)[0]
    low, high = bounds(second_over_first(old["abs_logprob_diff"], new["abs_logprob_diff"], 0.95))
    assert low == pytest.approx(2)
    assert high == pytest.approx(2)


def test_independent_samples_have_the_variance_of_both() -> None:
    old = traced_metrics(pair(0), 0.95)[0]["abs_logprob_diff"]
    new = traced_metrics(pair(1, first_cluster=1000), 0.95)[0]["abs_logprob_diff"]
    low, high = bounds(second_minus_first(old, new, 0.95))
    halves = [(bounds(metrics)[1] - bounds(metrics)[0]) / 2 for metrics in (old, new)]
    assert (high - low) / 2 == pytest.approx(np.hypot(*halves), rel=0.1)


@pytest.mark.slow
def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for repeat in range(200):
        old, new = (
            traced_metrics(pair(2 * repeat + side, 60, first_cluster=60 * side), names=["abs_logprob_diff"])[0]
            for side in range(2)
        )
        low, high = bounds(second_minus_first(old["abs_logprob_diff"], new["abs_logprob_diff"], 0.9))
        held += low <= 0 <= high
    assert 0.83 <= held / 200 <= 0.97


@pytest.mark.parametrize("name", ["kl_k1", "log_ppl_diff", "abs_logprob_diff_max"])
def test_what_may_change_sign_or_is_an_extreme_has_no_ratio(name: str) -> None:
    old, new = traced_metrics(pair(0))[0], traced_metrics(pair(1))[0]
    assert second_over_first(old[name], new[name], 0.95) is None


def test_a_part_holds_the_tokens_asked_for_and_keeps_their_prompts() -> None:
    sample = pair(0)
    part = part_of(sample, position=(20, 40), length=(30, None))
    assert part is not None
    chosen = sample.sequences.lengths >= 30
    assert part.sequences.clusters.tolist() == sample.sequences.clusters[chosen].tolist()
    assert part.sequences.lengths.tolist() == (np.minimum(sample.sequences.lengths[chosen], 40) - 20).tolist()
    start = sample.sequences.offsets[:-1][chosen][0] + 20
    assert part.log_pi[0] == sample.log_pi[start]
    assert part_of(sample, position=(1000, None)) is None


def test_a_clip_holds_d_and_nothing_else() -> None:
    sample = pair(0)
    part = part_of(sample, clip=0.005)
    assert part is not None
    assert np.allclose(part.diff, np.clip(sample.diff, -0.005, 0.005), atol=1e-15)
    assert np.array_equal(part.log_mu, sample.log_mu)
