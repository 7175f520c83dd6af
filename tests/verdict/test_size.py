"""A deviation that no rounding can make is a bug, whatever else is known; one that rounding can make is not decided."""

from typing import Any

import numpy as np
import pytest

import mismatch_probe as mp
from mismatch_probe.api.comparison import Comparison

pytestmark = pytest.mark.slow

RESPONSES, TOKENS = 24, 80


def compared(nats: float, **how: Any) -> Comparison:
    """Sides whose mean abs(d) is about so large, of no shape that is known."""
    random = np.random.default_rng(0)
    log_mu = -random.exponential(2.0, (RESPONSES, TOKENS)) - 5 * nats
    log_pi = np.minimum(log_mu + random.laplace(0, nats, log_mu.shape), -1e-4)
    if how.pop("on_grid", False):
        log_pi, log_mu = (_as_bf16(side) for side in (log_pi, log_mu))
    return mp.compare_logprobs(log_pi, log_mu, True, **how)


def _as_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(("nats", "dtype"), [(0.6, "bf16"), (9.8, "bf16"), (0.35, "fp16")])
def test_no_format_rounds_so(nats: float, dtype: str) -> None:
    verdict = compared(nats, train_dtype=dtype, infer_dtype=dtype).verdict
    assert (verdict.kind, verdict.code) == ("bug", "beyond_format")
    assert f"the two sides differ by more than {dtype.upper()} can" in verdict.sentence
    assert f"rounding in {dtype.upper()} explains at most 0." in verdict.evidence[0]


@pytest.mark.parametrize(
    ("nats", "dtype"), [(0.002, "bf16"), (0.064, "bf16"), (0.3, "bf16"), (0.008, "fp16"), (0.18, "fp16")]
)
def test_what_a_format_can_round_to_is_no_bug_by_its_size(nats: float, dtype: str) -> None:
    """An FP8 cache, which no log declares, makes 0.18 under any arithmetic."""
    verdict = compared(nats, train_dtype=dtype, infer_dtype=dtype).verdict
    assert verdict.kind == "undecided"
    assert "at most where it was measured" in verdict.evidence[0]


def test_the_coarser_side_says_how_much_is_rounding() -> None:
    assert compared(0.35, train_dtype="fp32", infer_dtype="bf16").verdict.kind == "undecided"


def test_a_grid_that_shows_stands_for_the_declared_format() -> None:
    """Log-probs of both sides that are exact in BF16 were rounded to it, whatever is declared."""
    verdict = compared(0.35, train_dtype="fp16", infer_dtype="fp16", on_grid=True).verdict
    assert verdict.kind == "undecided"
    assert "rounding in BF16" in verdict.evidence[0]


@pytest.mark.parametrize("spread", [0.4, 3.0])
def test_a_trainer_that_finds_all_tokens_alike_is_no_cut_vocabulary(spread: float) -> None:
    """All d lie on one side of 0, as where the engine samples from a part; no engine keeps a hundredth of the mass."""
    random = np.random.default_rng(0)
    log_mu = -random.exponential(0.6, (RESPONSES, TOKENS))
    log_pi = np.minimum(-12 + spread * random.standard_normal(log_mu.shape), -1e-4)
    verdict = mp.compare_logprobs(log_pi, log_mu, True, train_dtype="bf16", infer_dtype="bf16").verdict
    assert (verdict.kind, verdict.code) == ("bug", "beyond_format")


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_cut_vocabulary_is_named_however_much_is_cut(top_k: int) -> None:
    random = np.random.default_rng(0)
    logits = -np.sort(-3 * random.standard_normal((RESPONSES * TOKENS, 200)))
    full = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    cut = full[:, :top_k] - np.log(np.exp(full[:, :top_k]).sum(axis=1, keepdims=True))
    drawn = [random.choice(top_k, p=np.exp(row) / np.exp(row).sum()) for row in cut]
    log_mu, log_pi = (side[np.arange(len(side)), drawn].reshape(RESPONSES, TOKENS) for side in (cut, full))
    if top_k == 1:
        log_mu = np.minimum(log_mu - 1e-6 * random.exponential(1.0, log_mu.shape), -1e-9)
    verdict = mp.compare_logprobs(log_pi, log_mu, True, train_dtype="bf16", infer_dtype="bf16").verdict
    assert verdict.code == "truncated_support"


@pytest.mark.parametrize(("far", "code"), [(97.0, "beyond_format"), (900.0, "beyond_format"), (5.0, "unexplained")])
def test_one_token_that_no_format_rounds_so_far_is_a_bug_and_counted(far: float, code: str) -> None:
    random = np.random.default_rng(0)
    log_mu = -random.exponential(1.0, (RESPONSES, TOKENS))
    log_pi = log_mu + np.minimum(0.01 * random.standard_normal(log_mu.shape), -log_mu)
    log_pi[5, 3] -= far
    verdict = mp.compare_logprobs(log_pi, log_mu, True).verdict
    assert verdict.code == code
    assert ("1 token of 1,920 differ" in verdict.evidence[0]) == (code == "beyond_format")
