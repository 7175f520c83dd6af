"""Numbers are written with the digits their interval allows, and never read as zero when they are not."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.notation import (
    ABSENT,
    bounds_nothing,
    shown_number,
    write_about,
    write_bounds,
    write_estimate,
    write_number,
    write_range,
    write_share,
    write_size,
    write_token_count,
    write_tokens,
)
from mismatch_probe.stats.results import CurveBin, Estimate


def estimate(value: float, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(value, low, high, 0.95, 64, 1000, "token")


@pytest.mark.parametrize(
    ("value", "low", "high", "written"),
    [
        (3.31e-4, 2.9e-4, 3.8e-4, "3.3e-4 [2.9e-4, 3.8e-4]"),
        (0.0197, 0.0189, 0.0205, "0.0197 [0.0189, 0.0205]"),
        (2.34567e-6, 2.1e-6, 2.5e-6, "2.3e-6 [2.1e-6, 2.5e-6]"),
        (-1.01, -1.2, -0.8, "-1.01 [-1.20, -0.80]"),
        (0.0, 0.0, 0.0, "0 (none seen)"),
        (0.00346, 0.0012, 7.8e8, "0.0035 (too few to bound)"),
        (2.8e-3, 1.1e-9, 10.3e27, "0.0028 (too few to bound)"),
        (4.1e-6, 1.2e-6, 1.24e-4, "4.1e-6 [1e-6, 1.24e-4]"),
        (0.0127, 4e-4, 0.35, "0.013 [0.0004, 0.35]"),
        (-7.1e-7, -6.94e-6, 5.5e-6, "-7e-7 [-6.9e-6, 5.5e-6]"),
        (9.96e-6, 8.0e-6, 11.9e-6, "1.0e-5 [8.0e-6, 1.19e-5]"),
        (1.0, 1.0, 1.0, "1 (no spread)"),
        (0.25, 0.25, 0.25, "0.250 (no spread)"),
        (0.0024 + 2e-18, 0.0024 - 1e-18, 0.0024 + 4e-18, "0.00240 (no spread)"),
        (1 - 2.1e-9, 1 - 2.4e-9, 1 - 1.9e-9, "1 (within 1e-8)"),
        (1 + 3e-6, 1 + 2e-6, 1 + 4e-6, "1 (within 1e-5)"),
        (0.99997, 0.99996, 0.99998, "0.999970 [0.999960, 0.999980]"),
        (-0.00346, -7.8e8, -0.0012, "-0.0035 [-7.8e8, -0.0012]"),
        (3.0, -400.0, 500.0, "0 [-400, 500]"),
        (3.0, 0.4, 900.0, "3.0 [0.4, 900]"),
        (675.7, 668.9, 40859.9, "680 [670, 41,000]"),
        (0.0589, 0.0559, 64.2, "0.059 [0.056, 64]"),
        (9.73e-5, 9.69e-5, 0.0372, "9.7e-5 [0.000097, 0.037]"),
        (0.5, None, None, "0.500"),
        (1.0000042, None, None, "1.0000042"),
    ],
)
def test_the_interval_sets_the_digits(value: float, low: float | None, high: float | None, written: str) -> None:
    assert str(write_estimate(estimate(value, low, high))) == written


@pytest.mark.parametrize(
    ("low", "high", "limit", "written"),
    [
        (0.0026, 0.0031, 0.1, "0.0026 to 0.0031"),
        (0.00104, 0.009, 0.001, "0.00104 to 0.0090"),
        (0.0012, 7.8e8, 0.001, "0.00120 to 7.80e8"),
        (0.00346, 0.00346, 0.001, "0.00346 to 0.00346"),
        (1.0432, 1.0498, 1.05, "1.043 to 1.050"),
    ],
)
def test_bounds_are_numbers_on_the_side_of_the_limit_on_which_they_are(
    low: float, high: float, limit: float, written: str
) -> None:
    """`from too few to bound` beside `is broken` would say that nothing is known; `from 0.0010`, that 0.001 is kept."""
    assert write_bounds(estimate(low, low, high), limit) == written


@pytest.mark.parametrize(
    ("value", "low", "high", "written"),
    [
        (350.4, 331.0, 377.0, "350 [330, 380]"),
        (1049.0, 981.0, 1128.0, "1,050 [980, 1,130]"),
        (23_104.0, 21_840.0, 24_460.0, "23.1k [21.8k, 24.5k]"),
        (8.66e10, 7.9e10, 9.2e10, "87B [79B, 92B]"),
        (1e5, 8_400.0, 8e5, "100k [8,000, 800k]"),
        (1_900.0, 90.0, 40_000.0, "2,000 [90, 40k]"),
        (1.3e10, 1.05e5, 1.5e10, "13B [100k, 15B]"),
    ],
)
def test_tokens_are_written_as_people_say_them(value: float, low: float, high: float, written: str) -> None:
    assert str(write_tokens(estimate(value, low, high))) == written


def test_what_is_absent_says_so() -> None:
    assert str(write_estimate(None)) == str(write_tokens(None)) == write_number(None) == ABSENT


def test_a_tiny_share_never_reads_as_none() -> None:
    assert write_share(1, 10_000_000) == "< 0.01 %"
    assert write_share(0, 10) == "0 %"
    assert write_share(9_999_999, 10_000_000) != "100 %"


def test_a_bin_of_one_token_is_named_by_it() -> None:
    mean = estimate(1.0)
    assert write_range(CurveBin(0, 1, 1, mean, 1, 1, 1)) == "1"
    assert write_range(CurveBin(1024, 1536, 1254, mean, 1, 1, 1)) == "1,025 to 1,536"


def test_whole_numbers_of_tokens_keep_no_decimals() -> None:
    assert [write_token_count(number) for number in (1.0, 350.0, 1024.0, 12_345.0)] == ["1", "350", "1,024", "12.3k"]


@pytest.mark.slow
@given(value=st.floats(1e-14, 1e14), width=st.floats(1e-4, 3))
def test_what_is_written_is_within_half_its_interval_of_the_value(value: float, width: float) -> None:
    written = write_estimate(estimate(value, value * (1 - width / 2), value * (1 + width / 2)))
    assert abs(float(written.value.replace(",", "")) - value) <= max(value * width / 2, value * 1e-6)


@given(value=st.floats(1e-14, 1e14))
def test_a_positive_number_is_never_written_as_zero(value: float) -> None:
    assert float(write_number(value).replace(",", "")) > 0


def test_whole_numbers_are_written_as_they_are() -> None:
    written = [write_number(value) for value in (4096.0, 16384.0, 1.0, -3.0, 24.0, 131072.0)]
    assert written == ["4,096", "16,384", "1", "-3", "24", "1.31e5"]


@pytest.mark.slow
@given(value=st.floats(1e-14, 1e14), below=st.floats(1e-3, 1), above=st.floats(1, 1e3))
def test_no_number_of_an_estimate_starts_with_a_zero_before_a_power_of_ten(
    value: float, below: float, above: float
) -> None:
    written = str(write_estimate(estimate(value, value * below, value * above)))
    assert not re.search(r"\b0\.\d*e", written)


def test_what_is_no_number_is_named_and_breaks_nothing() -> None:
    assert [write_number(value) for value in (math.nan, math.inf, -math.inf)] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("seconds", "low", "high", "written"),
    [
        (4.2, 2.1, 8.4, "about 4 s (2 to 8)"),
        (14.4, 7.2, 43.0, "about 14 s (7 to 40)"),
        (88.0, 44.0, 176.0, "about 90 s (40 to 180)"),
        (240.0, 120.0, 480.0, "about 4 min (2 to 8)"),
        (100 * 60.0, 20 * 60.0, 300 * 60.0, "about 1.7 h (0.3 to 5)"),
        (0.01, 0.003, 0.03, "under 0.1 s"),
        (0.34, 0.1, 1.0, "about 0.3 s (0.1 to 1)"),
    ],
)
def test_a_time_that_is_not_known_exactly_shows_no_false_precision(
    seconds: float, low: float, high: float, written: str
) -> None:
    assert write_about(seconds, low, high) == written


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (86_550, 86_640, "(within 0.06 %)"),
        (86_600, 86_600, "(no spread)"),
        (80_000, 90_000, "[80k, 90k]"),
        (1, 1e13, "(too few to bound)"),
    ],
)
def test_an_interval_of_one_number_twice_is_said_in_words(low: float, high: float, words: str) -> None:
    assert write_tokens(estimate(86_600, low, high)).interval == words


def test_tokens_that_nothing_bounds_are_not_cut_to_none() -> None:
    assert str(write_tokens(estimate(7.6, 0.001, 1.3e11))) == "8 (too few to bound)"


@pytest.mark.parametrize(("tokens", "shown"), [(1.44e12, 1.4e12), (1.44e9, 1.4e9), (1.44e6, 1.4e6), (14_400, 14_000)])
def test_a_number_of_tokens_is_read_as_it_is_written(tokens: float, shown: float) -> None:
    assert shown_number(estimate(tokens, 0.5 * tokens, 1.5 * tokens), write_tokens) == pytest.approx(shown)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (312, "312 bytes"),
        (640 * 2**10, "640 KiB"),
        (3 * 2**20, "3 MiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_a_size_is_in_the_largest_unit_that_it_fills(num_bytes: int, words: str) -> None:
    assert write_size(num_bytes) == words


@pytest.mark.parametrize(
    ("bound", "numbers", "says_nothing"),
    [
        (6e-26, (0.31, 0.5), True),  # an ESS of which the sample bounds nothing
        (5e9, (0.002, 0.001), True),
        (0.021, (0.0125, 0.001), False),
        (1e-4, (1e-9, 0.1), False),  # a mean that is near 0 by luck
        (-0.2, (0.9, 0.5), False),
        (0.0, (0.0, 0.1), False),
        (0.0, (0.4, 0.5), True),
    ],
)
def test_a_bound_far_from_all_numbers_near_it_says_nothing(
    bound: float, numbers: tuple[float, ...], says_nothing: bool
) -> None:
    assert bounds_nothing(bound, *numbers) == says_nothing
