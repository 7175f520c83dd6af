"""One side in another format than the run says, by the errors of both sides against the reference."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.verdict.departures import rounding_floor
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import LEAST_UNSURE_NATS, grid_share, one_sided_dtype
from tests.verdict.simulated import disagreement, noisy, pair_of, world


def computed_in(
    pi: Dtype, mu: Dtype, *, dtype_asked_for: Dtype, seed: int = 0, formats_alone: bool = True
) -> Disagreement:
    """A pair asked for in one format whose sides compute in others."""
    given = world(seed=seed)
    pair = pair_of(given, noisy(given, pi), noisy(given, mu))
    return disagreement(given, pair, dtype_asked_for, is_settled=False, formats_alone=formats_alone)


@pytest.mark.parametrize(
    ("pi", "mu", "dtype_asked_for", "code"),
    [
        (Dtype.FP32, Dtype.BF16, Dtype.BF16, "training path's error is that of fp32, not bf16"),
        (Dtype.FP16, Dtype.BF16, Dtype.BF16, "training path's error is that of fp16, not bf16"),
        (Dtype.BF16, Dtype.FP16, Dtype.BF16, "engine's error is that of fp16, not bf16"),
        (Dtype.BF16, Dtype.FP32, Dtype.BF16, "engine's error is that of fp32, not bf16"),
        (Dtype.BF16, Dtype.FP16, Dtype.FP16, "training path's error is that of bf16, not fp16"),
        (Dtype.FP16, Dtype.BF16, Dtype.FP16, "engine's error is that of bf16, not fp16"),
    ],
)
def test_the_side_in_another_format_is_named(pi: Dtype, mu: Dtype, dtype_asked_for: Dtype, code: str) -> None:
    cause = one_sided_dtype(computed_in(pi, mu, dtype_asked_for=dtype_asked_for))
    assert cause is not None
    assert code in cause.sentence


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("seed", range(5))
def test_two_sides_in_the_format_asked_for_are_not_accused(dtype: Dtype, seed: int) -> None:
    assert one_sided_dtype(computed_in(dtype, dtype, dtype_asked_for=dtype, seed=seed)) is None


def test_an_error_twice_as_large_is_no_other_format() -> None:
    given = world()
    twice = given.logits + 2 * (noisy(given, Dtype.BF16) - given.logits)
    pair = pair_of(given, twice, noisy(given, Dtype.BF16))
    assert one_sided_dtype(disagreement(given, pair, Dtype.BF16, formats_alone=True)) is None


def test_neighbouring_formats_are_told_apart_only_once_fp32_agrees() -> None:
    assert one_sided_dtype(computed_in(Dtype.FP16, Dtype.BF16, dtype_asked_for=Dtype.BF16, formats_alone=False)) is None
    assert (
        one_sided_dtype(computed_in(Dtype.FP32, Dtype.BF16, dtype_asked_for=Dtype.BF16, formats_alone=False))
        is not None
    )


def test_a_side_far_off_is_no_other_format_of_the_other_side() -> None:
    given = world()
    pair = pair_of(given, given.logits + 5 * given.generator.normal(size=given.logits.shape), noisy(given, Dtype.BF16))
    assert one_sided_dtype(disagreement(given, pair, Dtype.BF16, is_settled=False)) is None


def test_the_floor_is_measured_on_the_side_that_errs_less() -> None:
    given = world()
    off = given.logits + given.generator.normal(size=given.logits.shape)
    clean, faulty = (pair_of(given, pi, noisy(given, Dtype.BF16)) for pi in (noisy(given, Dtype.BF16), off))
    assert rounding_floor(faulty, Dtype.BF16, Dtype.BF16) == pytest.approx(
        rounding_floor(clean, Dtype.BF16, Dtype.BF16), rel=0.2
    )


def test_without_a_reference_decode_against_prefill_is_the_floor() -> None:
    given = world()
    pair = pair_of(given, noisy(given, Dtype.BF16), noisy(given, Dtype.BF16))
    prefill = pair_of(
        replace(given, generator=given.generator), noisy(given, Dtype.BF16), noisy(given, Dtype.BF16)
    ).log_mu
    alone = replace(pair, log_ref=None, log_mu_prefill=None)
    assert rounding_floor(replace(alone, log_mu_prefill=prefill), Dtype.BF16, Dtype.BF16) > rounding_floor(
        alone, Dtype.BF16, Dtype.BF16
    )


@pytest.mark.parametrize("cut", [0xFFFFFFFF, 0xFFFF8000, 0xFFFFE000, 0xFFFF0000])
def test_a_number_is_exact_in_a_format_that_gives_it_back(cut: int) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32) & np.uint32(cut)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) >= LEAST_UNSURE_NATS)]
    with np.errstate(over="ignore"):
        in_fp16 = float((values.astype(np.float16).astype(np.float32) == values).mean())
    in_bf16 = float((values.view(np.uint32) & 0xFFFF == 0).mean())
    assert [grid_share(values, dtype) for dtype in (Dtype.FP16, Dtype.BF16)] == [in_fp16, in_bf16]
