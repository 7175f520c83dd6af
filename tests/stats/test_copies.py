"""What is a copy of another column of log-probs, and what is equal to it by rounding alone."""

import numpy as np
import pytest

from mismatch_probe.stats.copies import CopyTotals, RowCopyTotals, copy_totals, row_totals
from mismatch_probe.stats.sequences import Floats

RANDOM = np.random.default_rng(0)
RESPONSES, TOKENS = 16, 30
OTHER = -RANDOM.exponential(1.0, RESPONSES * TOKENS) - 1e-3
DIFFERENCES = {"bf16": 0.04, "fp16": 0.005, "fp32": 1e-6}


def computed(size: float) -> Floats:
    """A second computation: the error of a logit moves a log-prob by 1 - p of it."""
    return np.asarray(OTHER + RANDOM.normal(0, size, OTHER.size) * -np.expm1(OTHER))


def in_bf16(values: Floats) -> Floats:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


ROUNDED = {
    "as it is": lambda values: values,
    "fp32": lambda values: values.astype(np.float32),
    "fp16": lambda values: values.astype(np.float16).astype(np.float64),
    "bf16": in_bf16,
    "four decimals": lambda values: values.round(4),
    "two decimals": lambda values: values.round(2),
}


@pytest.mark.parametrize("written", ROUNDED)
@pytest.mark.parametrize("dtype", DIFFERENCES)
def test_two_computations_are_no_copy_however_they_are_written(dtype: str, written: str) -> None:
    write = ROUNDED[written]
    totals = CopyTotals.of(write(OTHER), write(computed(DIFFERENCES[dtype])))
    if totals.equal < totals.telling:  # of columns that are equal throughout nothing tells the one from the other
        assert not totals.is_copy, totals


@pytest.mark.parametrize("written", ["as it is", "fp32", "bf16", "four decimals"])
@pytest.mark.parametrize("share", [0.0, 1 / TOKENS, 0.1])
def test_a_copy_is_one_also_where_a_few_tokens_were_computed(share: float, written: str) -> None:
    own = np.arange(OTHER.size) % TOKENS < share * TOKENS
    copied = np.where(own, computed(DIFFERENCES["bf16"]), OTHER)
    totals = CopyTotals.of(ROUNDED[written](copied), ROUNDED[written](OTHER))
    assert totals.is_copy, totals
    assert totals.share >= 0.88


MANY = -np.random.default_rng(1).exponential(1.0, 6000) - 1e-3


@pytest.mark.parametrize("written", ["bf16", "fp16", "four decimals"])
@pytest.mark.parametrize("share", [0.02, 0.05])
def test_rounded_sides_are_no_copy_where_a_share_of_tokens_is_far_apart(written: str, share: float) -> None:
    """As where a mixture routes some tokens otherwise: rounding alone makes the others equal."""
    random = np.random.default_rng(2)
    far = random.normal(0, 0.3, MANY.size) * (random.random(MANY.size) < share)
    other = MANY + random.normal(0, 1e-5, MANY.size) + far
    totals = CopyTotals.of(ROUNDED[written](np.minimum(other, 0)), ROUNDED[written](MANY))
    assert totals.share > 0.9 - share
    assert not totals.is_copy, totals


@pytest.mark.parametrize("written", ["fp32", "bf16", "four decimals"])
@pytest.mark.parametrize("size", [0.01, 0.04])
def test_a_long_copy_is_one_also_where_many_tokens_were_computed(written: str, size: float) -> None:
    random = np.random.default_rng(2)
    own = random.normal(0, size, MANY.size) * -np.expm1(MANY) * (random.random(MANY.size) < 0.1)
    totals = CopyTotals.of(ROUNDED[written](np.minimum(MANY + own, 0)), ROUNDED[written](MANY))
    assert totals.is_copy, totals


@pytest.mark.parametrize("written", ["bf16", "fp16", "two decimals"])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_parts_add_up_to_what_the_whole_says_however_short_they_are(length: int, written: str) -> None:
    """Of a response of one token all or none is equal."""
    first, second = (ROUNDED[written](side) for side in (OTHER, computed(5e-4)))
    rows = np.arange(OTHER.size) // length
    parts = copy_totals(first, second, rows, int(rows[-1]) + 1).sum(axis=0)
    copies_of_all = CopyTotals.of(first, second)
    assert parts.tolist() == [copies_of_all.telling, copies_of_all.equal, copies_of_all.near]
    assert copies_of_all.equal < copies_of_all.telling
    assert not copies_of_all.is_copy


def test_tokens_that_both_sides_are_sure_of_tell_nothing() -> None:
    """All are equal to the last bit, as FP32 gives them; or but for some that a copy would not have."""
    sure = OTHER / 1e3
    assert not CopyTotals.of(sure, sure).is_copy
    assert not CopyTotals.of(sure, np.where(np.arange(sure.size) % TOKENS == 0, -2.0, sure)).is_copy


def test_a_few_tokens_tell_nothing() -> None:
    assert not CopyTotals.of(OTHER[:15], OTHER[:15]).is_copy
    assert CopyTotals.of(OTHER[:40], OTHER[:40]).is_copy


def test_what_is_missing_on_a_side_does_not_hide_a_copy() -> None:
    lost = np.where(np.arange(OTHER.size) % 3 == 0, np.nan, OTHER)
    assert CopyTotals.of(lost, OTHER).is_copy
    assert not CopyTotals.of(np.full(OTHER.size, np.nan), OTHER).is_copy


def test_totals_of_parts_add_up() -> None:
    halves = [slice(0, OTHER.size // 2), slice(OTHER.size // 2, None)]
    one, other = (CopyTotals.of(OTHER[half], OTHER[half]) for half in halves)
    assert one + other == CopyTotals.of(OTHER, OTHER)


def test_a_response_is_a_copy_by_what_the_others_show() -> None:
    response = CopyTotals(telling=40, equal=39)
    assert response.is_copy_beside(CopyTotals(telling=1000, equal=20))
    assert not response.is_copy_beside(CopyTotals(telling=1000, equal=950))
    assert not response.is_copy_beside(CopyTotals(telling=10, equal=0))
    assert not CopyTotals(telling=12, equal=12).is_copy_beside(CopyTotals(telling=1000, equal=20))


SHORT_ROWS, OF_A_ROW = 1024, 6
SHORT = np.repeat(np.arange(SHORT_ROWS), OF_A_ROW)


def honest(size: float, seed: int) -> tuple[Floats, Floats]:
    """Half of the rows nearly sure of every token, the others not."""
    random = np.random.default_rng(seed)
    scale = random.choice([0.03, 1.0], SHORT_ROWS)[SHORT]
    first = -random.exponential(1.0, SHORT.size) * scale
    return first, np.minimum(first + random.normal(0, size, SHORT.size) * -np.expm1(first), 0)


@pytest.mark.parametrize("written", ROUNDED)
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2])
def test_short_rows_that_two_computations_make_equal_are_no_copies(size: float, written: str) -> None:
    first, second = (ROUNDED[written](side) for side in honest(size, 3))
    assert not RowCopyTotals.of(row_totals(first, second, SHORT, SHORT_ROWS)).copied


def test_an_answer_that_comes_again_and_again_is_no_proof() -> None:
    """A choice of two tokens is equal by chance once, and so each time that it is drawn."""
    first, second = honest(1e-2, 4)
    answer = SHORT % 2 == 0
    tile = np.tile(first[:OF_A_ROW], SHORT_ROWS)
    first, second = np.where(answer, tile, first), np.where(answer, tile, second)
    assert not RowCopyTotals.of(row_totals(first, second, SHORT, SHORT_ROWS)).copied


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_short_rows_that_are_copies_are_counted_and_the_equal_ones_of_a_token_are_undecided(share: float) -> None:
    first, second = honest(1e-2, 5)
    copied = share * SHORT_ROWS > SHORT
    totals = row_totals(first, np.where(copied, first, second), SHORT, SHORT_ROWS)
    rows = RowCopyTotals.of(totals)
    assert 0.8 * share * SHORT_ROWS < rows.copied <= share * SHORT_ROWS + 1
    telling = totals.of_all[: int(np.ceil(share * SHORT_ROWS)), 0]
    assert rows.short.undecided == pytest.approx((telling == 1).sum(), abs=2)
