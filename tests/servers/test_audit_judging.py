"""What `audit` makes of served tokens, on tokens that are drawn here: no server is asked."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from mismatch_probe.audit.judging import (
    AuditFindings,
    CheckpointView,
    JudgedPrediction,
    TemperatureFit,
    alike_words,
    best_law,
    equal_words,
    judge_dtype,
    judge_prediction,
    law_words,
    measure_agreement,
    temperature_of_seeds,
)
from mismatch_probe.audit.scoring import (
    QUANTISATIONS,
    Drawn,
    InverseTemperatures,
    Prediction,
    Quantisation,
    gumbel_noise,
    round_weight,
)
from mismatch_probe.audit.verdict import _cause_of, _evidence
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.records.examinations import Agreement, AuditCandidate
from mismatch_probe.stats.agreement import Rounding
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences

slow = pytest.mark.slow


def drawn_from(laws: list[Distribution], evidence: list[float]) -> CheckpointView:
    """Tokens that have so many nats more under each law than under the first one."""
    zeros = np.zeros(1)
    log_probs = np.array(evidence)[:, None]
    draws = Drawn(log_probs, np.zeros(len(laws)), zeros, zeros, zeros, zeros, zeros, zeros.astype(np.int64), zeros > 0)
    return CheckpointView(None, laws, draws, TemperatureFit(1.0, 0.9, 1.1))


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        ([0.0, 44.0, 40.0, 38.0, 45.0], ["temperature 0.4"]),
        ([0.0, 44.0, 20.0, 25.0, 45.0], []),
        ([0.0, 32.0, 40.0, 44.0, 45.0], ["top-p 0.7"]),
        ([0.0, 14.0, 5.0, -0.2, 15.0], []),
    ],
)
def test_settings_that_the_tokens_do_not_tell_apart_are_named_together(evidence: list[float], words: list[str]) -> None:
    """Two values of one setting are one, and a second departure that gains little is none."""
    claim = Distribution(1.0)
    laws = [claim, *(replace(claim, **each) for each in ({"top_p": 0.7}, {"temperature": 0.4}, {"temperature": 0.5}))]
    laws.append(replace(claim, top_p=0.7, temperature=0.5))
    view = drawn_from(laws, evidence)
    best, _ = best_law(laws, view.draws)
    assert alike_words(view, law_words(laws[best], claim)) == words
    assert alike_words(view, "another prompt") == []


def seeded_bounds(temperature: float, seed: int, rounding: float) -> InverseTemperatures:
    """Of tokens that noise draws at that temperature from logits that are moved by so many nats."""
    random = np.random.default_rng(seed)
    logits, noise = random.normal(0, 3, (600, 50)), random.gumbel(size=(600, 50))
    moved = logits + rounding * random.standard_normal(logits.shape)
    own = np.arange(600), (moved / temperature + noise).argmax(axis=1)
    ahead = logits[own][:, None] - logits
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = (noise - noise[own][:, None]) / ahead
    low, high = np.where(ahead > 0, bounds, 0), np.where(ahead < 0, bounds, np.inf)
    slopes = [np.abs(ahead[np.arange(600), at]) for at in (low.argmax(axis=1), high.argmin(axis=1))]
    return InverseTemperatures(np.maximum(low.max(axis=1), 0), slopes[0], high.min(axis=1), slopes[1])


@slow
@pytest.mark.parametrize("rounding", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.3])
def test_the_temperature_at_which_the_noise_names_the_tokens_is_theirs(temperature: float, rounding: float) -> None:
    fits = [temperature_of_seeds(seeded_bounds(temperature, seed, rounding), 0.95) for seed in range(6)]
    assert all(fit is not None and abs(fit.value / temperature - 1) < 0.03 for fit in fits)
    assert sum(fit is not None and fit.low <= temperature <= fit.high for fit in fits) >= 4


def test_of_dtypes_that_fit_alike_the_one_is_named_whose_rounding_has_the_size() -> None:
    findings = SimpleNamespace(
        responses=SimpleNamespace(other_prompts=[]),
        look=SimpleNamespace(by_seeds=None),
        sample=SimpleNamespace(law=None),
    )
    claim = SimpleNamespace(fits=False)
    candidates = [
        AuditCandidate(kind="arithmetic", what=what, num_differing=6, noise_times=times, fits=True)
        for what, times in (("as declared", 900.0), ("BF16", 0.09), ("FP16", 0.7))
    ]
    cause = _cause_of(cast(AuditFindings, findings), cast(JudgedPrediction, claim), candidates)
    assert cause is not None
    assert cause.what == "FP16"


@pytest.mark.parametrize("served", ["bf16", "fp32"])
def test_tokens_that_a_coarse_dtype_rounds_fit_it_where_fp32_is_declared(served: str) -> None:
    random = np.random.default_rng(4)
    margins, coarse, exact = random.gamma(1.0, 2.0, 4000), *(random.standard_t(4, (2, 4000)) * [[0.02], [1e-6]])
    moved = coarse if served == "bf16" else exact
    gaps = np.where(moved > margins, margins, 0.0)
    ids = np.zeros(4000, dtype=np.int64)
    claim = Prediction(ids, ids + 1, margins, gaps, margins)
    as_declared = Rounding.of(margins, exact)
    refuted = judge_prediction("as declared", "as declared", claim, as_declared, np.arange(4000))
    other, times = judge_dtype(
        "arithmetic in BF16", claim, margins + random.standard_t(4, 4000) * 0.02, as_declared, np.arange(4000)
    )
    assert refuted.fits == (served == "fp32")
    assert other.fits == (served == "bf16"), "of what BF16 rounds 4,000 tokens show some"
    assert times > 1000


@pytest.mark.parametrize(
    ("times", "num_tokens", "is_shown"),
    [(1.0, 4000, False), (0.5, 20_000, False), (0.0, 4000, True), (0.0, 200, False)],
)
def test_a_server_that_is_more_exact_than_declared_is_as_declared_and_the_evidence_has_it(
    times: float, num_tokens: int, *, is_shown: bool
) -> None:
    """Its kernels round so many times as far as BF16; few tokens do not tell."""
    random = np.random.default_rng(5)
    margins = random.gamma(1.0, 2.0, num_tokens)
    errors, moved = random.standard_t(4, (2, num_tokens)) * 0.02
    gaps = np.where(times * moved > margins, margins, 0.0)
    ids, clusters = np.zeros(num_tokens, dtype=np.int64), np.arange(num_tokens) // 50
    prediction = Prediction(ids + (gaps > 0), ids, margins, gaps, margins)
    rounding = Rounding.of(margins, errors)
    claim = judge_prediction("as declared", "as declared", prediction, rounding, clusters)
    estimator = Estimator(Sequences.of_lengths(np.full(num_tokens // 50, 50)), 0.95)
    agreement = measure_agreement(claim, prediction, rounding, estimator, clusters)
    findings = SimpleNamespace(settings=SimpleNamespace(dtype=Dtype.BF16), look=None, sample=None)
    words = " ".join(_evidence(cast(AuditFindings, findings), claim, agreement, None, []))
    assert claim.fits
    assert ("more exactly than BF16" in words) == is_shown


@pytest.mark.parametrize("quantisation", QUANTISATIONS, ids=lambda each: each.name)
def test_rounded_weights_have_as_many_values_as_the_format(quantisation: Quantisation) -> None:
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    rounded = round_weight(weight, quantisation)
    group = weight[0, : quantisation.group or 256]
    of_group = rounded[0, : quantisation.group or 256]
    assert len(of_group.unique()) <= 2 * quantisation.levels + 1
    assert float((of_group - group).abs().max()) <= float(group.abs().max()) / (8 if quantisation.is_float else 13)
    assert torch.equal(round_weight(rounded, quantisation), rounded)
    assert not torch.equal(rounded, weight)


def test_a_share_so_near_to_1_that_its_digits_do_not_tell_is_written_as_1() -> None:
    def estimate(value: float, low: float, high: float) -> Estimate:
        return Estimate(value, low, high, 0.95, 24, 1536, "token", 24)

    agreement = Agreement.model_construct(
        equal=estimate(0.99935, 0.98719, 0.99999999996), floor=estimate(0.99996, 0.9999, 1.0)
    )
    words = equal_words(agreement)
    assert words.startswith("99.935 % [98.7 %, 100 %] of 1,536 tokens")
    assert words.endswith("names 99.9960 %")


def test_the_noise_is_gumbel_and_follows_from_the_seed() -> None:
    noise = gumbel_noise([5, 5, 6], 20_000)
    assert np.array_equal(noise[0], noise[1])
    assert not np.array_equal(noise[0], noise[2])
    assert abs(noise.mean() - np.euler_gamma) < 0.03
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.03
