import numpy as np
import pytest

from mismatch_probe.stats.bins import confidence_bins
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.stats.worst_responses import error_histograms, probability_scatter, worst_tokens
from tests.stats.pairs import clustered_pair, pair_with


def with_reference(seed: int = 0) -> TokenPair:
    pair = clustered_pair(30, seed)
    log_ref = pair.log_mu + np.random.default_rng(seed).normal(0, 1e-3, pair.sequences.num_tokens)
    return TokenPair(pair.sequences, pair.log_pi, pair.log_mu, log_ref)


def test_equal_probabilities_lie_on_the_diagonal():
    scatter = probability_scatter(pair_with(np.zeros(1000), [400, 600]))
    assert all(x == y for x, y, _ in scatter.cells)
    assert sum(count for *_, count in scatter.cells) == 1000


def test_the_scatter_puts_mu_on_x_and_pi_on_y():
    pair = TokenPair(Sequences.of_lengths([1]), np.log([0.26]), np.log([0.76]))
    assert probability_scatter(pair, num_bins=4).cells == [(3, 1, 1)]


def test_certain_tokens_fall_in_the_last_cell():
    pair = TokenPair(Sequences.of_lengths([1]), np.array([0.001]), np.zeros(1))
    assert probability_scatter(pair, num_bins=10).cells == [(9, 9, 1)]


def test_error_histograms_count_every_token_once():
    pair = with_reference()
    for histogram in error_histograms(pair):
        assert len(histogram.edges_log10) == len(histogram.counts) + 1
        assert sum(histogram.counts) + histogram.zeros == pair.sequences.num_tokens


def test_an_error_lands_between_its_edges_and_exact_agreement_is_counted_apart():
    errors = np.array([0.0, 0.05, 1e-20, 1e-3])
    pair = TokenPair(Sequences.of_lengths([4]), -1.0 + errors, np.full(4, -1.0), np.full(4, -1.0))
    of_pi, of_mu = error_histograms(pair)
    assert (of_pi.side, of_mu.side) == ("pi", "mu")
    assert of_mu.zeros == 4
    assert of_pi.zeros == 2
    filled = [number for number, count in enumerate(of_pi.counts) if count]
    assert of_pi.edges_log10[filled[-1]] <= np.log10(0.05) < of_pi.edges_log10[filled[-1] + 1]


def test_without_a_reference_there_is_no_error_to_draw():
    assert error_histograms(clustered_pair(4, seed=0)) == []


def test_the_worst_tokens_come_largest_first_with_their_place():
    diff = np.zeros(30)
    diff[[3, 17, 29]] = [0.5, -2.0, 1.0]
    worst = worst_tokens(pair_with(diff, [10, 10, 10]), 3)
    assert [(token.row, token.position) for token in worst] == [(1, 7), (2, 9), (0, 3)]
    assert worst[0].log_pi - worst[0].log_mu == pytest.approx(-2.0)


@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_no_more_tokens_are_worst_than_there_are(count: int):
    assert len(worst_tokens(pair_with(np.arange(5.0) / 10, [2, 3]), count)) == min(count, 5)


def test_confidence_bins_hold_every_token_once_and_average_to_the_whole():
    pair = with_reference()
    bins = confidence_bins(pair)
    assert sum(part.num_tokens for part in bins) == pair.sequences.num_tokens
    total = sum(part.mean_abs_diff.value * part.num_tokens for part in bins)
    assert total == pytest.approx(pair.abs_diff.sum())
    assert pair.log_ref is not None
    squares = sum((part.rms_error_mu or 0) ** 2 * part.num_tokens for part in bins)
    assert squares == pytest.approx(((pair.log_mu - pair.log_ref) ** 2).sum())


def test_deviation_of_unsure_tokens_shows_in_their_bins():
    random = np.random.default_rng(0)
    log_ref = np.log(random.random(20_000) * 0.999 + 0.0005)
    error = random.normal(size=log_ref.size) * (1 - np.exp(log_ref)) * 0.1
    bins = confidence_bins(TokenPair(Sequences.of_lengths(np.full(100, 200)), log_ref + error, log_ref, log_ref))
    means = [part.mean_abs_diff.value for part in bins if part.num_tokens > 500]
    assert means == sorted(means, reverse=True)
    assert all(part.rms_error_mu == 0 for part in bins)


def test_without_a_reference_the_bins_are_of_mu_and_know_no_errors():
    bins = confidence_bins(clustered_pair(10, seed=0))
    assert bins
    assert all(part.rms_error_pi is None and part.rms_error_mu is None for part in bins)
