"""Where a handful of tokens hold most of the KL, a line says how many, which share, and which is the largest."""

import numpy as np
import pytest

import mismatch_probe as mp
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair
from mismatch_probe.stats.worst_responses import few_tokens
from tests.verdict.simulated import noisy, pair_of, world

RESPONSES, TOKENS = 80, 60


def sides(seed: int = 0, *, spread: float = 0.01) -> tuple[Floats, Floats]:
    """log pi and log mu [80, 60]; both are nearly sure of some tokens."""
    random = np.random.default_rng(seed)
    log_mu = -random.exponential(1.0, (RESPONSES, TOKENS))
    return log_mu * (1 + spread * random.uniform(-1, 1, log_mu.shape)), log_mu


def in_place(row: int, position: int) -> tuple[str, int]:
    return str(row), position


def pair(log_pi: Floats, log_mu: Floats) -> TokenPair:
    return TokenPair(Sequences.of_lengths([log_mu.shape[1]] * len(log_mu)), log_pi.ravel(), log_mu.ravel())


def with_far_zeros(count: int) -> tuple[Floats, Floats]:
    """Of an engine that rounds what it is sure of to 0, with as many zeros at tokens that pi is not sure of."""
    log_pi, log_mu = sides()
    log_mu = np.where(log_mu > -0.3, 0.0, log_mu)
    log_pi = np.where(log_mu == 0, log_pi / 100, log_pi)
    rows = np.linspace(0, RESPONSES - 1, count).astype(int)
    log_pi[rows, 7], log_mu[rows, 7] = -3.0, 0.0
    log_pi[rows[1], 7] = -3.5
    return log_pi, log_mu


def test_scattered_zeros_that_raise_the_kl_are_told_with_their_share_and_place() -> None:
    log_pi, log_mu = with_far_zeros(3)
    found = few_tokens(pair(log_pi, log_mu), in_place)
    assert found is not None
    assert (found.num_tokens, found.zeros_mu, found.zeros_pi, found.of_tokens) == (3, 3, 0, RESPONSES * TOKENS)
    assert found.share_of_kl > 0.9
    assert (found.position, found.log_pi, found.log_mu) == (7, -3.5, 0.0)


def test_the_line_stands_in_the_text_and_in_the_evidence_of_a_comparison() -> None:
    log_pi, log_mu = with_far_zeros(2)
    mask = np.ones(log_pi.shape, dtype=bool)
    mask[:5, :3] = False
    mask[10] = False
    compared = mp.compare_logprobs(log_pi, log_mu, mask)
    rows = RESPONSES * TOKENS - 15 - TOKENS
    words = f"2 tokens of {rows:,} hold "
    assert any(words in line for line in compared.verdict.evidence)
    assert f" % of it from 2 tokens of {rows:,}; " in compared.summary.headline
    assert compared.verdict.kind == "undecided"
    text = " ".join(str(compared).split())
    assert words in text
    assert f"at index 7 (token 8) of row {RESPONSES - 1}, with log pi -3.5" in text
    assert "2 of them are exactly 0 on the engine's side" in text


def test_one_token_stands_alone() -> None:
    log_pi, log_mu = sides()
    log_pi[4, 5], log_mu[4, 5] = 0.0, -6.0
    text = " ".join(str(mp.compare_logprobs(log_pi, log_mu, True)).split())
    assert "1 token of 4,800 holds" in text
    assert "it stands at index 5 (token 6) of row 4" in text
    assert "it is exactly 0 on the training path's side" in text


@pytest.mark.parametrize("spread", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("responses", [2, 6, 40])
def test_rounding_is_held_by_no_few(spread: float, responses: int) -> None:
    for seed in range(3):
        given = world(num_sequences=responses, spread=spread, seed=seed)
        assert few_tokens(pair_of(given, noisy(given, Dtype.BF16), noisy(given, Dtype.BF16)), in_place) is None


def test_a_handful_of_tokens_is_too_few_for_one_of_them_to_stand_out() -> None:
    log_pi, log_mu = (side[:1, :40] for side in with_far_zeros(2))
    assert few_tokens(pair(log_pi, log_mu), in_place) is None


def test_sides_that_agree_hold_nothing() -> None:
    log_pi, _ = sides()
    assert few_tokens(pair(log_pi, log_pi), in_place) is None


def test_a_heavy_tail_may_be_told_and_changes_no_verdict() -> None:
    random = np.random.default_rng(1)
    log_mu = -4 - random.exponential(1.0, (RESPONSES, TOKENS))
    d = np.clip(0.01 * random.standard_cauchy(log_mu.shape), -4, 4)
    compared = mp.compare_logprobs(log_mu + d, log_mu, True)
    assert (compared.verdict.kind, compared.verdict.code) == ("undecided", "unexplained")
    few = compared.pair.few_tokens
    assert few is not None
    assert few.num_tokens <= max(5, 0.002 * few.of_tokens)
    assert few.zeros_mu == 0
