"""A model that FP32 cannot compute is no bug; a fault beyond FP32's rounding is one, in such a model too."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.compare.verdict_input import NO_REPEAT
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.rounding import conditioning
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair
from mismatch_probe.verdict.departures import FP32_AGREES_NATS, exact_outcome, exact_pair_agrees
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.signatures.profile import Disagreement
from tests.verdict.test_judge import case

pytestmark = pytest.mark.slow

AMPLIFIED_NATS = 3e-3
"""The median scale of FP32's rounding on a token, a thousand times a usual one."""


def ill_conditioned(
    *, seed: int = 0, scale: float = AMPLIFIED_NATS, engine: float = 1.6, num_sequences: int = 24, fault: Any = None
) -> Disagreement:
    """An FP32 pair whose tokens are sensitive to rounding each by a factor of its own, with heavy tails.

    engine: its rounding over the training path's. fault: errors [T] that are added to the engine's log-probs.
    """
    generator = np.random.default_rng(seed)
    sequences = Sequences.of_lengths(generator.integers(20, 60, num_sequences))
    size = sequences.num_tokens
    exact = -0.5 - generator.exponential(2.0, size)
    sensitivity = scale * generator.lognormal(0, 1.2, size)

    def rounded(times: float) -> Floats:
        return np.asarray(exact + times * sensitivity * generator.normal(size=size), dtype=np.float64)

    ref, pi, mu = rounded(1.0), rounded(1.0), rounded(engine)
    mu = mu if fault is None else mu + fault(generator, sequences)
    log_pi, log_mu, log_ref = (np.minimum(leg, 0.0).astype(np.float32) for leg in (pi, mu, ref))
    pair = TokenPair(sequences, log_pi, log_mu, log_ref, log_ref_fp32=log_ref, log_ref_fp64=exact)
    floor = max(2e-5, 1.4 * float(np.sqrt(np.mean((ref - exact) ** 2))))
    return Disagreement(pair, Dtype.FP32, Dtype.FP32, floor=floor, conditioning=conditioning(pair, 0.95))


def everywhere(nats: float) -> Any:
    return lambda generator, sequences: nats * generator.normal(size=sequences.num_tokens)


def at_one_token(nats: float) -> Any:
    return lambda generator, sequences: np.where(np.arange(sequences.num_tokens) == 7, -nats, 0.0)


def late(nats: float) -> Any:
    return lambda generator, sequences: nats * (sequences.positions > 15) * generator.normal(size=sequences.num_tokens)


def in_one_response(nats: float) -> Any:
    return lambda generator, sequences: np.where(
        np.arange(sequences.num_tokens) < sequences.lengths[0], nats * generator.normal(size=sequences.num_tokens), 0.0
    )


def of_sure_tokens(*, seed: int = 0, fault: float = 0.0) -> Disagreement:
    """An ill-conditioned model that is sure of most tokens, where an engine's log-softmax has a coarser last digit.

    fault: nats by which the engine is off on every token, up or down.
    """
    generator = np.random.default_rng(seed)
    sequences = Sequences.of_lengths(generator.integers(20, 60, 24))
    size = sequences.num_tokens
    is_sure = generator.random(size) < 0.7
    exact = np.where(is_sure, -(10.0 ** generator.uniform(-9, -5, size)), -generator.exponential(2.0, size))
    sensitivity = AMPLIFIED_NATS * generator.lognormal(0, 1.2, size) * -np.expm1(exact)

    def computed(digit: float) -> Floats:
        errors = sensitivity * generator.normal(size=size) + digit * np.round(generator.normal(size=size))
        return np.asarray(exact + errors, dtype=np.float64)

    log_ref, log_pi = (np.minimum(computed(6e-8), 0.0).astype(np.float32) for _ in range(2))
    log_mu = np.minimum(computed(2e-6) + fault * generator.choice([-1, 1], size=size), 0.0).astype(np.float32)
    pair = TokenPair(sequences, log_pi, log_mu, log_ref, log_ref_fp32=log_ref, log_ref_fp64=exact)
    floor = 1.4 * float(np.sqrt(np.mean((log_ref - exact) ** 2)))
    return Disagreement(pair, Dtype.FP32, Dtype.FP32, floor=floor, conditioning=conditioning(pair, 0.95))


def test_the_last_digit_of_sure_tokens_is_no_bug() -> None:
    pairs = [of_sure_tokens(seed=seed) for seed in range(20)]
    assert not any(exact_pair_agrees(pair) for pair in pairs)
    assert {exact_outcome(pair) for pair in pairs} == {"rounding"}
    assert {exact_outcome(of_sure_tokens(seed=seed, fault=1e-3)) for seed in range(20)} == {"differs"}


def test_few_prompts_excuse_nothing_where_fp32_computes_the_model() -> None:
    """The interval of two prompts reaches down to nothing where one of them has all of the fault."""
    faulty = [ill_conditioned(seed=seed, scale=1e-6, num_sequences=2, fault=in_one_response(0.01)) for seed in range(9)]
    assert {exact_outcome(pair) for pair in faulty} == {"differs"}
    sound = [ill_conditioned(seed=seed, num_sequences=2) for seed in range(9)]
    assert "differs" not in {exact_outcome(pair) for pair in sound}


def test_a_mean_beyond_the_largest_error_of_rounding_is_a_bug_with_two_prompts_too() -> None:
    """FP32 is 3e-5 nats from FP64 here, as on Gemma 3."""
    faults = [in_one_response(0.02), everywhere(0.02)]
    faulty = [
        ill_conditioned(seed=seed, scale=2e-5, num_sequences=2, fault=each) for seed in range(9) for each in faults
    ]
    assert {exact_outcome(pair) for pair in faulty} == {"differs"}
    sound = [ill_conditioned(seed=seed, scale=scale, num_sequences=2) for seed in range(99) for scale in (2e-5, 3e-3)]
    assert "differs" not in {exact_outcome(pair) for pair in sound}


def test_the_wider_bound_of_agreement_excuses_no_fault_beyond_rounding() -> None:
    """FP32 is 2e-5 to 5e-5 nats from FP64 here, and a pair agrees up to 6e-4 nats by its size."""
    for scale in (1.5e-5, 3e-5):
        faulty = [ill_conditioned(seed=seed, scale=scale, fault=everywhere(6e-4)) for seed in range(9)]
        assert all(exact_pair_agrees(pair) for pair in faulty)
        assert {exact_outcome(pair) for pair in faulty} == {"differs"}
    sound = [ill_conditioned(seed=seed, scale=6e-5) for seed in range(9)]
    assert all(pair.pair.abs_diff.mean() > FP32_AGREES_NATS for pair in sound)
    assert {exact_outcome(pair) for pair in sound} == {"agrees"}


@pytest.mark.parametrize("num_sequences", [6, 24])
def test_no_healthy_pair_of_an_ill_conditioned_model_is_called_a_bug(num_sequences: int) -> None:
    pairs = [ill_conditioned(seed=seed, num_sequences=num_sequences) for seed in range(40)]
    assert not any(exact_pair_agrees(pair) for pair in pairs)
    outcomes = [exact_outcome(pair) for pair in pairs]
    assert "differs" not in outcomes
    assert outcomes.count("rounding") >= 0.95 * len(outcomes)


@pytest.mark.parametrize("fault", [everywhere(0.2), late(0.4), at_one_token(3.0)])
def test_a_fault_beyond_rounding_of_fp32_is_a_bug_in_such_a_model_too(fault: Any) -> None:
    assert {exact_outcome(ill_conditioned(seed=seed, fault=fault)) for seed in range(20)} == {"differs"}


@pytest.mark.parametrize("fault", [everywhere(1e-3), late(0.02), at_one_token(0.3)])
def test_a_well_conditioned_model_excuses_nothing(fault: Any) -> None:
    sound = ill_conditioned(scale=1e-6)
    assert exact_outcome(sound) == "agrees"
    assert exact_outcome(ill_conditioned(scale=1e-6, fault=fault)) == "differs"


def test_without_a_measurement_in_fp64_size_alone_is_a_bug() -> None:
    assert exact_outcome(replace(ill_conditioned(), conditioning=None)) == "differs"


def test_an_error_that_the_reference_shares_excuses_nobody() -> None:
    """A training path with a fault in FP32 and in FP64 alike is as far from the engine, and FP32 as near to FP64."""
    sound = ill_conditioned(scale=1e-6)
    fault = 0.01 * np.random.default_rng(1).normal(size=sound.pair.sequences.num_tokens)
    legs = {name: getattr(sound.pair, name) for name in ("log_pi", "log_ref", "log_ref_fp32", "log_ref_fp64")}
    pair = replace(sound.pair, **{name: np.minimum(leg + fault, 0.0) for name, leg in legs.items()})
    assert exact_outcome(replace(sound, pair=pair, conditioning=conditioning(pair, 0.95))) == "differs"


def test_the_verdict_names_the_model_and_how_far_fp32_is_from_fp64() -> None:
    pair = ill_conditioned()
    verdict = judge(case(pair, pair))
    assert (verdict.kind, verdict.code) == ("precision", Code.ILL_CONDITIONED)
    assert "nats a token from FP64 on this checkpoint, so that no format computes it to better" in verdict.sentence
    assert any(line.startswith("FP32 itself is 0.00") for line in verdict.evidence)


def test_a_coarser_pair_of_such_a_model_is_precision_by_its_fp32_pair() -> None:
    exact = ill_conditioned()
    coarse = replace(
        ill_conditioned(scale=1.0), train_dtype=Dtype.BF16, infer_dtype=Dtype.BF16, conditioning=exact.conditioning
    )
    verdict = judge(case(coarse, exact))
    assert (verdict.kind, verdict.code) == ("precision", Code.ILL_CONDITIONED)


def test_rounding_that_was_measured_bounds_what_a_coarse_pair_without_fp32_may_differ_by() -> None:
    exact = ill_conditioned()
    wild = ill_conditioned(scale=2.0)
    coarse = replace(wild, train_dtype=Dtype.BF16, infer_dtype=Dtype.BF16, conditioning=None)
    accused = judge(case(coarse))
    assert (accused.kind, accused.code) == ("bug", Code.BEYOND_FORMAT)
    verdict = judge(case(replace(coarse, conditioning=exact.conditioning)))
    assert (verdict.kind, verdict.code) == ("undecided", Code.UNEXPLAINED)
    well = conditioning(ill_conditioned(scale=1e-6).pair, 0.95)
    assert judge(case(replace(coarse, conditioning=well))).code == Code.BEYOND_FORMAT


def test_where_fp64_cannot_be_had_a_deviation_without_a_shape_is_undecided() -> None:
    pair = replace(ill_conditioned(), conditioning="not enough memory")
    verdict = judge(case(pair, pair))
    assert (verdict.kind, verdict.code) == ("undecided", Code.ILL_CONDITIONED)
    assert "could not be computed in FP64: not enough memory." in verdict.sentence


def test_a_training_path_that_does_not_repeat_in_fp64_either_is_not_acquitted_by_it() -> None:
    """With dropout FP32 is far from FP64, and no rounding is why."""
    noisy = replace(ill_conditioned(), conditioning=NO_REPEAT, exact_repeat=0.02)
    verdict = judge(case(noisy, noisy))
    assert (verdict.kind, verdict.code) == ("bug", Code.NOT_REPEATABLE)
    assert "two FP64 passes over the same tokens differ" in verdict.sentence
    assert any("could not be measured in FP64" in line for line in verdict.evidence)
    for repeats in (0.0, 1e-9, None):
        pair = replace(ill_conditioned(), exact_repeat=repeats)
        assert judge(case(pair, pair)).code == Code.ILL_CONDITIONED


def test_an_error_that_is_somewhat_larger_is_undecided() -> None:
    outcomes = {exact_outcome(ill_conditioned(seed=seed, engine=4.6, num_sequences=6)) for seed in range(20)}
    assert "open" in outcomes
    pair = next(
        each
        for each in (ill_conditioned(seed=seed, engine=4.6, num_sequences=6) for seed in range(20))
        if exact_outcome(each) == "open"
    )
    verdict = judge(case(pair, pair))
    assert (verdict.kind, verdict.code) == ("undecided", Code.ILL_CONDITIONED)
