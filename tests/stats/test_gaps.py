"""Tokens that are left out of responses shift nothing: those after them keep their places."""

import numpy as np

from mismatch_probe.difference.versus import part_of
from mismatch_probe.guards.departure_totals import DepartureTotals
from mismatch_probe.stats.pair_totals import PairTotals
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import label_offset

RNG = np.random.default_rng(0)


def gapped(pair: TokenPair, usable: np.ndarray) -> TokenPair:
    sequences = pair.sequences.of_usable_tokens(usable)
    assert sequences is not None
    return TokenPair(sequences, pair.log_pi[usable], pair.log_mu[usable])


def test_places_steps_and_completeness_stay_with_the_tokens() -> None:
    sequences = Sequences.of_lengths([3, 2, 4], [7, 8, 9])
    kept = sequences.of_usable_tokens(np.array([1, 0, 1, 0, 0, 1, 1, 1, 1], bool))
    assert kept is not None
    assert kept.positions.tolist() == [0, 2, 0, 1, 2, 3]
    assert kept.complete is not None
    assert (kept.complete.tolist(), kept.clusters.tolist()) == ([False, True], [7, 9])
    again = kept.of_tokens(np.array([0, 1, 1, 0, 1, 0], bool))
    assert again is not None
    assert again.positions.tolist() == [2, 0, 2]


def test_all_tokens_have_no_gaps_and_none_have_no_sequence() -> None:
    sequences = Sequences.of_lengths([3, 2])
    everything = sequences.of_usable_tokens(np.ones(5, bool))
    assert everything is not None
    assert (everything.places, everything.complete) == (None, None)
    assert sequences.of_usable_tokens(np.zeros(5, bool)) is None


def test_neighbours_are_those_of_the_response_and_not_of_the_array() -> None:
    complete_pair = Sequences.of_lengths([4, 3])
    assert [found.tolist() for found in complete_pair.neighbours(1)] == [[0, 1, 2, 4, 5], [1, 2, 3, 5, 6]]
    kept = complete_pair.of_usable_tokens(np.array([1, 0, 1, 1, 0, 1, 1], bool))
    assert kept is not None
    assert [found.tolist() for found in kept.neighbours(1)] == [[1, 3], [2, 4]]
    assert [found.tolist() for found in kept.neighbours(-1)] == [[2, 4], [1, 3]]
    assert [found.tolist() for found in kept.neighbours(2)] == [[0], [1]]


def shifted_labels(shift: int) -> TokenPair:
    """pi stands `shift` tokens after mu in each of 40 responses."""
    log_mu = -RNG.exponential(1.0, (40, 30))
    log_pi = np.roll(log_mu, shift, axis=1) + 1e-3 * RNG.standard_normal((40, 30))
    return TokenPair(Sequences.of_lengths([30] * 40), np.minimum(log_pi, 0).ravel(), log_mu.ravel())


def test_a_shift_by_one_token_is_seen_where_one_in_four_tokens_is_missing() -> None:
    pair = gapped(shifted_labels(1), RNG.random(1200) > 0.25)
    cause = label_offset(Disagreement(pair, "bf16", "bf16", floor=0.01))
    assert cause is not None
    assert DepartureTotals.of(pair).metrics()["shift_left"] < 0.3
    without_places = TokenPair(Sequences.of_lengths(pair.sequences.lengths), pair.log_pi, pair.log_mu)
    assert DepartureTotals.of(without_places).metrics()["shift_left"] > 0.3


def test_sides_that_belong_together_show_no_shift_over_gaps() -> None:
    pair = gapped(shifted_labels(0), RNG.random(1200) > 0.25)
    assert DepartureTotals.of(pair).metrics()["shift_left"] > 1
    assert label_offset(Disagreement(pair, "bf16", "bf16", floor=1e-5)) is None


def test_sums_over_responses_are_of_the_whole_ones() -> None:
    pair = shifted_labels(0)
    usable = np.ones(1200, bool)
    usable[5] = False
    complete_pair = pair.of_tokens(pair.sequences.spread(np.arange(40) > 0))
    assert complete_pair is not None
    values, expected = PairTotals.of(gapped(pair, usable)).values(), PairTotals.of(complete_pair).values()
    for name in ("ess_seq", "chi2_seq", "log_ppl_diff", "abs_logprob_diff_seq"):
        assert values[name] == expected[name]


def test_a_slice_of_positions_holds_the_tokens_that_stand_there() -> None:
    pair = gapped(
        TokenPair(Sequences.of_lengths([6]), -np.arange(6.0), -np.ones(6)), np.array([1, 0, 0, 1, 1, 1], bool)
    )
    late = part_of(pair, position=(4, None))
    assert late is not None
    assert late.log_pi.tolist() == [-4.0, -5.0]
    assert late.sequences.positions.tolist() == [4, 5]
