"""A pass needs more than an interval that keeps the limit: what no sample of its size shows must keep it too."""

import math

import numpy as np
import pytest

from benchmarks.tails import CLIP, TailDesign, draw
from mismatch_probe.errors import UsageError
from mismatch_probe.gate.config import parse_gate
from mismatch_probe.gate.decide import GateDecision, decide
from mismatch_probe.gate.measure import Evidence, Measurer

NORMAL, STUDENT = TailDesign(math.inf, 0.03), TailDesign(3, 0.03)
LIMITS = {"kl_k3": 0.001716, "kl_k2": 0.001598}
"""At the truth of the Student design, an integral: `benchmarks.tails.expectation`."""


def decided(design: TailDesign, seed: int, **check: object) -> GateDecision:
    pair = draw(design, 64, 4, np.random.default_rng([5, seed]))
    settings = {"max_sequences": 256, "check": [{"clip": CLIP, **check}]}
    return decide(parse_gate({"gate": settings}, "gate.toml"), Measurer({("bf16", "bf16"): Evidence(pair, 256)}))


def test_what_is_too_rare_for_the_sample_keeps_a_limit_open_and_says_what_decides() -> None:
    [check] = decided(STUDENT, 0, metric="kl_k3", max=0.002).checks
    assert check.high is not None
    assert check.high < check.limit
    assert check.answer == "inconclusive"
    assert check.tail_is_open
    assert check.tokens_to_decide is not None
    assert check.tokens_to_decide > check.num_tokens
    assert f"about {check.tokens_to_decide:,} tokens decide, a clip below 5 may" in check.sentence


def test_a_limit_far_above_what_is_too_rare_passes() -> None:
    assert decided(STUDENT, 0, metric="kl_k3", max=0.02).answer == "pass"


def test_a_normal_tail_keeps_nothing_open() -> None:
    [check] = decided(NORMAL, 0, metric="kl_k3", max=1.2 * 0.00054).checks
    assert check.answer == "pass"
    assert not check.tail_is_open


@pytest.mark.parametrize("metric", ["ess_token", "chi2_token", "ess_seq"])
def test_squared_weights_never_block_with_or_without_a_clip(metric: str) -> None:
    for clip in ({}, {"clip": CLIP}):
        with pytest.raises(UsageError, match=f"{metric} never blocks"):
            parse_gate({"gate": {"check": [{"metric": metric, "min": 0.5, **clip}]}}, "gate.toml")


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "truth"), LIMITS.items())
def test_a_limit_at_the_truth_hardly_ever_passes(metric: str, truth: float) -> None:
    answers = [decided(STUDENT, seed, metric=metric, max=truth).answer for seed in range(40)]
    assert answers.count("pass") <= 4


@pytest.mark.slow
def test_normal_errors_a_quarter_below_the_limit_pass() -> None:
    answers = [decided(NORMAL, seed, metric="kl_k3", max=1.25 * 0.00054).answer for seed in range(40)]
    assert answers.count("pass") >= 36
