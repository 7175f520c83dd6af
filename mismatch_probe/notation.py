"""How numbers are written: the one place, so that sentences, the terminal and the page print identical strings.

The interval sets the digits: half its width is shown to one significant digit (two where it starts with a 1), and the
value is cut at the same place; each number has its own power of ten. A bound much smaller than that gets the digits it
needs not to read as zero, and a value whose interval leaves zero out has two significant digits at least: by one alone
it would read as another number than it does elsewhere. A bound that would be rounded past the value has the value's
digits. A number without an interval gets three significant digits, a whole one all of its own. An interval of 0 alone
is none: where no sample shows a difference, how large a rare one is cannot be known, and the metric `differs` bounds
how rare. Where an interval says nothing, words say why.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mismatch_probe.stats.results import CurveBin, Estimate

ABSENT = "n/a"
_NONE_SEEN = "(none seen)"
_NO_SPREAD = "(no spread)"
_UNBOUNDED = "(too few to bound)"

_MIN_SIGNIFICANT = 2
_MAX_SIGNIFICANT = 7
_DEFAULT_SIGNIFICANT = 3
_MAX_EXTRA_DIGITS = 3
_BESIDE_ONE = 0.05
_HARDLY_OFF_ONE = 1e-5
_NO_WIDTH = 1e-9
"""Of the value: what the rounding of sums leaves."""
_BOUNDS_NOTHING = 1e4
"""A bound so many times the value is that of an interval from too few prompts."""
_SMALLEST_PLAIN = 1e-3
_LARGEST_PLAIN = 1e5
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TOKEN_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k"))
_UNITS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}


@dataclass(frozen=True)
class WrittenNumber:
    """A number and its interval as strings; `interval` is empty where there is none."""

    value: str
    interval: str = ""

    def __str__(self) -> str:
        return f"{self.value} {self.interval}".strip()

    def in_words(self, unit: str, level: float) -> str:
        """`90 tokens (95 % interval: 3 to 2,400)`, for a sentence."""
        interval = f"({100 * level:g} % interval: {self.bounds})" if self.bounds else self.interval
        return f"{self.value} {unit} {interval}".strip()

    @property
    def bounds(self) -> str:
        """`2.9e-4 to 3.8e-4`, for a sentence, and where no brackets stand; empty where words stand for the interval."""
        return self.interval[1:-1].replace(", ", " to ") if self.interval.startswith("[") else ""


def write_estimate(estimate: Estimate | None) -> WrittenNumber:
    """`3.3e-4 [2.9e-4, 3.8e-4]`; `0 (none seen)` where every value of the sample is 0."""
    if estimate is None:
        return WrittenNumber(ABSENT)
    if estimate.low == estimate.value == estimate.high == 0:
        return WrittenNumber("0", _NONE_SEEN)
    if (words := _words_for_interval(estimate)) is not None:
        return words
    exponent = _leading_exponent(estimate)
    leaves_zero_out = estimate.low is not None and estimate.high is not None and estimate.low * estimate.high > 0

    def write_at(number: float, place: int) -> str:
        if leaves_zero_out and abs(number) < 10.0**place / 2:
            own = _exponent(number)
            return _write_at(number, own - _MIN_SIGNIFICANT + 1, own)
        return _write_at(number, place, exponent)

    return _write_with_interval(estimate, _MIN_SIGNIFICANT, _MAX_SIGNIFICANT, write_at)


def _words_for_interval(estimate: Estimate) -> WrittenNumber | None:
    """Where an interval would say nothing: it has no width, its digits are those of 1, or it bounds nothing."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if low is None or high is None:
        return None
    farthest = max(abs(number - 1) for number in (low, value, high))
    if 0 < farthest < _HARDLY_OFF_ONE:
        return WrittenNumber("1", f"(within 1e{math.ceil(math.log10(farthest))})")
    if high - low <= _NO_WIDTH * abs(value):
        return WrittenNumber(write_number(value), _NO_SPREAD)
    if value > 0 and high > _BOUNDS_NOTHING * value:
        exponent = _exponent(value)
        return WrittenNumber(_write_at(value, exponent - _MIN_SIGNIFICANT + 1, exponent), _UNBOUNDED)
    return None


def bounds_nothing(bound: float, *numbers: float) -> bool:
    """Whether a bound lies so many times beyond all of these numbers, or below them, that it says nothing."""
    return bound > _BOUNDS_NOTHING * max(numbers) > 0 or 0 <= bound < min(numbers) / _BOUNDS_NOTHING


def write_tokens(estimate: Estimate | None) -> WrittenNumber:
    """A number of tokens with its interval: `1,050 [980, 1,130]`, `23.1k [21.8k, 24.5k]`."""
    if estimate is None:
        return WrittenNumber(ABSENT)
    if estimate.high is not None and 0 < _BOUNDS_NOTHING * estimate.value < estimate.high:
        return WrittenNumber(_write_tokens_at(estimate.value, _exponent(estimate.value)), _UNBOUNDED)
    return _write_with_interval(estimate, 1, _DEFAULT_SIGNIFICANT, _write_tokens_at)


def write_number(number: float | None) -> str:
    """A number that has no interval, to three significant digits; `nan` or `inf` where it is none."""
    if number is None:
        return ABSENT
    if not math.isfinite(number):
        return str(number)
    if number == round(number) and abs(number) < _LARGEST_PLAIN:
        return write_count(round(number))
    return _write_at(number, _default_place(number), _exponent(number))


def write_token_count(number: float) -> str:
    """A rounded number of tokens: `350`, `1,050`, `23.1k`, `1.20M`."""
    if number == round(number) and abs(number) < 1e4:
        return write_count(round(number))
    return _write_tokens_at(number, _exponent(number) - _DEFAULT_SIGNIFICANT + 1)


def write_count(number: int) -> str:
    """An exact count: `1,234,567`."""
    return f"{number:,}"


def write_many(number: int, what: str) -> str:
    """`1 log-prob`, `1,234 log-probs`; `what` is one of them."""
    return f"{write_count(number)} {what}{'' if number == 1 else 's'}"


def write_share(part: float, total: float) -> str:
    """`0.8 %`; a share too small to show reads `< 0.01 %`, never `0 %`."""
    if total == 0:
        return ABSENT
    percent = 100 * part / total
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2g} %" if percent < 99 else f"{math.floor(percent * 100) / 100:g} %"


def write_value(estimate: Estimate) -> str:
    """Without its interval, which sets its digits where there is one."""
    return write_number(estimate.value) if estimate.low is None else write_estimate(estimate).value


def write_bounds(estimate: Estimate, limit: float) -> str:
    """`2.9e-4 to 3.8e-4`: the digits are those of the interval, or three where no bounds would be read, or one on the
    other side of the limit and three tell it from the limit.
    """
    assert estimate.low is not None
    assert estimate.high is not None
    bounds = (estimate.low, estimate.high)
    texts = write_estimate(estimate).bounds.split(" to ")
    if len(texts) < len(bounds):
        return " to ".join(map(write_number, bounds))

    def side(number: float) -> int:
        return (number > limit) - (number < limit)

    def write(bound: float, text: str) -> str:
        by_itself = write_number(bound)
        return by_itself if side(_read(text)) != side(bound) == side(_read(by_itself)) else text

    return " to ".join(map(write, bounds, texts))


def _read(text: str) -> float:
    unit = _UNITS.get(text[-1:], 1.0)
    return float(text.rstrip("".join(_UNITS)).replace(",", "")) * unit


def shown_number(estimate: Estimate, write: Callable[[Estimate], WrittenNumber] = write_estimate) -> float:
    """The value of an estimate as it is written, so that what is computed from it agrees with what is read."""
    try:
        return _read(write(estimate).value)
    except ValueError:
        return estimate.value


def write_percent(fraction: float) -> str:
    """A fraction to whole percent: `54 %`."""
    return f"{100 * fraction:.0f} %"


def write_fold(times: float) -> str:
    """So many times, to two digits: `42,000-fold`, `2.3-fold`."""
    return f"{float(f'{times:.2g}'):,.15g}-fold"


def write_range(bin_: CurveBin) -> str:
    """Which tokens of a response a bin holds, numbered from 1: `3 to 4`."""
    first, last = round(bin_.low) + 1, round(bin_.high)
    return write_count(first) if first == last else f"{write_count(first)} to {write_count(last)}"


def write_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def write_about(seconds: float, low: float, high: float) -> str:
    """A time that is not known exactly, and between what it lies: `about 4 min (2 to 8)`."""
    if seconds < 0.1:
        return write_rough_seconds(seconds)
    _, size = _unit_of_time(seconds)
    return f"about {write_rough_seconds(seconds)} ({_write_one_digit(low / size)} to {_write_one_digit(high / size)})"


def write_rough_seconds(seconds: float) -> str:
    """One digit, or two where the first is a 1: `4 min`; more would say that it is known."""
    unit, size = _unit_of_time(seconds)
    return f"{_write_one_digit(seconds / size)} {unit}" if seconds >= 0.1 else "under 0.1 s"


def _unit_of_time(seconds: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in (("h", 3600), ("min", 60)) if seconds >= 1.5 * size), ("s", 1))


def _write_one_digit(number: float) -> str:
    if number < 1:
        return f"{number:.1f}"
    place = _exponent(number)
    if number / 10.0**place < 2:
        place -= 1
    return f"{round(number, -place):g}" if place < 0 else f"{round(number, -place):.0f}"


def write_power(base: int, exponent: int) -> str:
    """`2¹⁶`."""
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"


def with_powers(text: str) -> str:
    """`2^3` of a sentence as `2³`."""
    return re.sub(r"\b2\^(\d+)", lambda power: write_power(2, int(power[1])), text)


def write_error(error: float | None) -> str:
    """An error that is None where it is infinite or NaN."""
    return "not finite" if error is None else write_number(error)


def write_change(worse: float) -> str:
    """`12.3% worse`, `4.0% better`."""
    return f"{abs(worse):.1%} {'better' if worse < 0 else 'worse'}"


def round_outwards(value: float, *, is_up: bool) -> float:
    """`value` to three digits, rounded to the side on which a limit still passes."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - _DEFAULT_SIGNIFICANT + 1)
    return float(f"{(math.ceil if is_up else math.floor)(value / unit) * unit:.{_DEFAULT_SIGNIFICANT}g}")


def join_names(names: Sequence[str], most: int | None = None) -> str:
    """`a`, `a and b`, `a, b and c`; of more than `most` the first ones and how many more."""
    if most is not None and len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capital(text: str) -> str:
    """The text as a sentence begins."""
    return f"{text[:1].upper()}{text[1:]}"


def write_size(num_bytes: int) -> str:
    """In the largest unit that it fills once: `1.5 GiB`, `3 MiB`, `640 KiB`, `12 bytes`."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes >= 2**10 else write_many(num_bytes, "byte")


def _write_with_interval(
    estimate: Estimate, fewest: int, most: int, write_at: Callable[[float, int], str]
) -> WrittenNumber:
    place = _last_place(estimate, fewest, most)
    if estimate.low is None or estimate.high is None:
        return WrittenNumber(write_at(estimate.value, place))
    own = place if estimate.low <= 0 <= estimate.high else min(place, _exponent(estimate.value) - fewest + 1)
    value = write_at(estimate.value, place if abs(estimate.value) < 10.0**place / 2 else own)
    shown_value = round(estimate.value, -own)
    place_of_low, place_of_high = (_place_of_bound(bound, place) for bound in (estimate.low, estimate.high))
    low = write_at(estimate.low, own if round(estimate.low, -place_of_low) > shown_value else place_of_low)
    high = write_at(estimate.high, own if round(estimate.high, -place_of_high) < shown_value else place_of_high)
    return WrittenNumber(value, f"[{low}, {high}]" if low != high else _words_within(estimate))


def _words_within(estimate: Estimate) -> str:
    """For an interval that the digits shown do not tell from its value."""
    assert estimate.low is not None
    assert estimate.high is not None
    farthest = max(estimate.value - estimate.low, estimate.high - estimate.value)
    if not farthest:
        return _NO_SPREAD
    share = 100 * farthest / abs(estimate.value)
    place = _exponent(share)
    return f"(within {math.ceil(share / 10.0**place) * 10.0**place:g} %)"


def _place_of_bound(bound: float, place: int) -> int:
    """`place`, or a little further where the bound would be cut to zero."""
    own = _exponent(bound)
    return own if place - _MAX_EXTRA_DIGITS <= own < place else place


def _last_place(estimate: Estimate, fewest: int, most: int) -> int:
    """The power of ten of the last digit shown: set by the interval, between `fewest` and `most` significant digits."""
    leading = _leading_exponent(estimate)
    half_width = _half_width(estimate)
    if not half_width:
        return _default_place(estimate.value)
    place = _exponent(half_width)
    if half_width < 2 * 10.0**place:
        place -= 1
    return min(max(place, leading - most + 1), leading - fewest + 1)


def _default_place(number: float) -> int:
    """Three significant digits; for a number near 1 (a ratio, a correlation), as many as show its distance from 1."""
    place = _exponent(number) - _DEFAULT_SIGNIFICANT + 1
    distance = abs(abs(number) - 1)
    return max(_exponent(distance) - 1, -_MAX_SIGNIFICANT) if 0 < distance < _BESIDE_ONE else place


def _leading_exponent(estimate: Estimate) -> int:
    """The exponent a number is written with; its interval's where the value drowns in it."""
    return _exponent(max(abs(estimate.value), _half_width(estimate)))


def _half_width(estimate: Estimate) -> float:
    if estimate.low is None or estimate.high is None:
        return 0.0
    return max(0.0, (estimate.high - estimate.low) / 2)


def _exponent(number: float) -> int:
    return math.floor(math.log10(abs(number))) if number else 0


def _write_at(number: float, place: int, exponent: int) -> str:
    """`number` cut at 10**place, in scientific notation with `exponent` where plain digits would not be readable."""
    if number == 0:
        return "0"
    if _SMALLEST_PLAIN <= 10.0**exponent < _LARGEST_PLAIN:
        return _no_negative_zero(f"{round(number, -place):,.{max(0, -place)}f}")
    mantissa, power = f"{number:.{max(0, _exponent(number) - place)}e}".split("e")
    return "0" if _exponent(number) < place - 1 else f"{mantissa}e{int(power)}"


def _write_tokens_at(number: float, place: int) -> str:
    """A bound far below its number keeps a digit of its own: `13B [100k, 15B]`; parts of a token are `< 1`."""
    if 0 < number < 1:
        return "< 1"
    if number and not round(number, -place):
        place = _exponent(number)
    rounded_number = round(number, -place)
    for scale, suffix in _TOKEN_SUFFIXES:
        if abs(rounded_number) >= scale:
            unit = 1e3 if suffix == "k" else scale
            decimals = max(0, round(math.log10(unit)) - place)
            return f"{rounded_number / unit:,.{decimals}f}{suffix}"
    return _no_negative_zero(f"{rounded_number:,.{max(0, -place)}f}")


def _no_negative_zero(text: str) -> str:
    return text.removeprefix("-") if not text.strip("-0.,") else text
