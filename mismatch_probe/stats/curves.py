"""The shape of a curve over steps: flat, growing, falling, a step, a sawtooth.

A curve of a trainer has no responses behind it, so that its noise is known from the curve alone. Its values are taken
as normal scores of their ranks, which no single spike moves. Whether the level changes at all is one test, the largest
excursion of the cumulative sum over its long-run deviation [Kolmogorov's law of a Brownian bridge; Ploberger and Kramer
1992, Econometrica 60:271]. A few smooth values look like noise with a long memory to it, so that their drift is tested
too, the mean of their differences over its standard error, which holds whatever the memory is. What the change looks
like is then the best of three descriptions (a step, a line, a line from an onset on) by least absolute deviations.
Noise that remembers its past is expected: the long-run deviation is that of an autoregression, whose coefficient is
read off differences, which a change of level hardly moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from mismatch_probe.stats.growth import LEAP
from mismatch_probe.stats.sequences import Floats, Ints, Mask

ShapeKind = Literal["flat", "growing", "falling", "step_up", "step_down", "sawtooth", "unsure", "too_short"]

FEWEST_STEPS: Final = 12
"""Fewer values allow no statement."""
LEVEL_BY_CHANCE: Final = 1e-3
"""The p-value below which the level changes."""
LEAST_FOLD: Final = 1.5
"""Of the levels at both ends: a smaller change is worth no word."""
_FEWEST_OF_A_LEAP: Final = 4
_UNSURE_FOLD: Final = 2.0
"""Of the levels at both ends: a larger change is not called flat, whatever the test says."""
_UNSURE_LEFT: Final = 0.5
"""The share of the sum of squares that such a change leaves at most."""
_MOST_MEMORY: Final = 0.97
_MEMORY_ERRORS: Final = 1.75
"""By so many of its standard errors the memory is taken larger than it is measured."""
_FURTHEST_SPREAD: Final = 4.0
_EDGE: Final = 0.05
"""The share of steps that a step or an onset leaves at each end, at least three."""
_SHARPER: Final = 0.93
"""A step is named where it leaves so much less than the best line."""
SAWTOOTH_BY_CHANCE: Final = 1e-3
LEAST_TOOTH: Final = 1.15
"""Of a sawtooth: the highest phase, or staleness, over the lowest."""
_FEWEST_TEETH: Final = 4
_MOST_PHASES: Final = 64


@dataclass(frozen=True)
class CurveShape:
    """What a curve does from its first step to its last."""

    kind: ShapeKind
    first_level: float
    """The level at the start; the median where the curve is flat. An `unsure` curve changes as growth would, or a step,
    but noise with a long memory can do the same.
    """
    last_level: float
    p_value: float
    """That chance alone moves the level so far."""
    place: int | None = None
    """The index of the first value after a step, or at which growth begins."""
    period: int | None = None
    """Steps of a tooth; None where it follows the staleness."""
    tooth: float | None = None
    """The highest phase over the lowest one."""

    @property
    def fold(self) -> float:
        """The last level over the first."""
        return self.last_level / self.first_level


def shape_of(values: Floats, staleness: Floats | None = None) -> CurveShape:
    """The shape of a curve of positive values [steps]; staleness [steps] is that of the weights that sampled, where it
    is recorded.
    """
    positive = values > 0
    logs = np.log(np.where(positive, values, np.nan))
    if positive.sum() < FEWEST_STEPS or positive.mean() < 0.5:
        level = float(np.median(values)) if len(values) else 0.0
        return CurveShape("too_short", level, level, 1.0)
    index = np.flatnonzero(positive)
    logs = logs[index]
    chance = min(_level_chance(_normal_scores(logs)), _drift_chance(logs))
    median = float(np.exp(np.median(logs)))
    change = _best_change(logs)
    if change is not None and (chance <= LEVEL_BY_CHANCE or _leaps(logs)):
        ends = float(np.exp(change.first)), float(np.exp(change.last))
        return CurveShape(change.kind, *ends, chance, int(index[change.place]))
    old = None if staleness is None else staleness[index]
    if (teeth := _sawtooth(logs, old, median, chance)) is not None:
        return teeth
    if change is not None and change.may_be_sure:
        return CurveShape("unsure", float(np.exp(change.first)), float(np.exp(change.last)), chance)
    return CurveShape("flat", median, median, chance)


def levels_at_ends(values: Floats) -> tuple[float, float]:
    """The levels of a curve of any sign at its start and its end; twice its median where the level does not change."""
    median = float(np.median(values))
    if len(values) < FEWEST_STEPS:
        return median, median
    if _level_chance(_normal_scores(values)) > LEVEL_BY_CHANCE and _gap_of_ends(values) <= 0:
        return median, median
    edge = max(3, round(_EDGE * len(values)))
    return float(np.median(values[:edge])), float(np.median(values[-edge:]))


def _normal_scores(values: Floats) -> Floats:
    from scipy.special import ndtri
    from scipy.stats import rankdata

    scores: Floats = ndtri((rankdata(values) - 0.375) / (len(values) + 0.25))
    return scores


def _level_chance(scores: Floats) -> float:
    """The p-value of the largest excursion of the cumulative sum, had the level stayed."""
    from scipy.special import kolmogorov

    sums = np.abs(np.cumsum(scores - scores.mean()))
    deviation, _ = _memory_of(scores, int(np.argmax(sums[:-1])) + 1)
    return float(kolmogorov(sums.max() / np.sqrt(len(scores)) / deviation))


def _drift_chance(logs: Floats) -> float:
    """The smaller p-value of two tests of the differences from value to value, had they no direction: Student's t of
    their mean, and that all rise or all fall. Those of noise around a level cancel, so that both are conservative
    there; of a random walk they are exact.
    """
    from scipy.special import stdtr

    differences = np.diff(logs)
    size = len(differences)
    if not differences.any():
        return 1.0
    is_one_way = bool((differences > 0).all() or (differences < 0).all())
    one_way = 2.0 ** (1 - size) if is_one_way else 1.0
    error = differences.std(ddof=1) / np.sqrt(size)
    if error <= 0:
        return one_way
    return min(one_way, 2 * float(stdtr(size - 1, -abs(differences.mean()) / error)))


def _leaps(logs: Floats) -> bool:
    """Whether all values of an end lie far beyond all of the other half: what a test of a few values can miss."""
    return _gap_of_ends(logs) > float(np.log(LEAP))


def _gap_of_ends(values: Floats) -> float:
    """By how much all values of an end lie beyond all of the other half; negative where they do not."""
    fewest, half = max(_FEWEST_OF_A_LEAP, len(values) // 10), len(values) // 2
    ends = ((values[:half], values[-fewest:]), (values[:fewest], values[half:]))
    return float(max(max(last.min() - first.max(), first.min() - last.max()) for first, last in ends))


def _memory_of(scores: Floats, cut: int) -> tuple[float, float]:
    """Root of the long-run variance of an autoregression of order one, and its coefficient, the memory.

    The mean squares of differences over one and over two values are in the ratio 1 + memory. A level that changes
    slowly leaves both, and differences across the likeliest step, at `cut`, are left out. The memory is taken at the
    upper end of what these differences allow, because one that is too small finds changes in noise.
    """
    near, far = (np.mean(np.square(_differences(scores, lag, cut))) for lag in (1, 2))
    if near <= 0:
        return float(np.std(scores)) or 1.0, 0.0
    memory = far / near - 1
    memory += _MEMORY_ERRORS * np.sqrt(max(1 - memory**2, 0.05) / len(scores))
    memory = float(np.clip(memory, 0.0, _MOST_MEMORY))
    return float(np.sqrt(near * (1 + memory) / 2) / (1 - memory)), memory


def _differences(scores: Floats, lag: int, cut: int) -> Floats:
    """Differences over `lag` values, but for those that reach across the cut."""
    return np.delete(scores[lag:] - scores[:-lag], np.arange(max(cut - lag, 0), min(cut, len(scores) - lag)))


class _CurveChange(NamedTuple):
    """The description of a curve of logs that leaves least."""

    kind: ShapeKind
    first: float
    last: float
    """The levels at both ends."""
    place: int
    share_left: float
    """Of the sum of squares around the mean, what it leaves."""

    @property
    def may_be_sure(self) -> bool:
        """Whether it is too large and fits too well for the curve to be called flat, whatever the test says."""
        return abs(self.last - self.first) >= np.log(_UNSURE_FOLD) and self.share_left <= _UNSURE_LEFT


def _best_change(logs: Floats) -> _CurveChange | None:
    """None where the change is too small."""
    size = len(logs)
    edge = max(3, round(_EDGE * size))
    calm = _without_spikes(logs)
    places = np.arange(edge, size - edge + 1)
    cut, level_at_first, level_at_last, step_left = _best_step(calm, places)
    onset, start, slope, line_left = _best_line(calm, np.concatenate([[0], places[places <= size - 2 * edge]]))
    if step_left <= _SHARPER * line_left:
        kind: ShapeKind = "step_up" if level_at_last > level_at_first else "step_down"
        first, last, place = level_at_first, level_at_last, cut
    else:
        end = start + slope * (size - 1 - onset)
        first, last, place = _within(start, calm[: max(onset, edge)]), _within(end, calm[-edge:]), onset
        kind = "growing" if slope > 0 else "falling"
    if abs(last - first) < np.log(LEAST_FOLD):
        return None
    share_left = min(step_left, line_left) / max(float(np.square(calm - calm.mean()).sum()), 1e-300)
    return _CurveChange(kind, first, last, int(place), share_left)


def _within(level: float, logs: Floats) -> float:
    """The level, no farther out than the values it is a level of, since a line is only near a curve that bends."""
    return float(np.clip(level, logs.min(), logs.max()))


def _without_spikes(logs: Floats) -> Floats:
    """Values with those far from the running median drawn in, so that a spike is no change."""
    width = max(3, len(logs) // 20) | 1
    padded = np.pad(logs, width // 2, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    far = _FURTHEST_SPREAD * 1.4826 * float(np.median(np.abs(logs - middle))) + 1e-12
    drawn_in: Floats = np.clip(logs, middle - far, middle + far)
    return drawn_in


def _best_step(logs: Floats, places: Ints) -> tuple[int, float, float, float]:
    """The place of the best step, the levels before and after it, and the sum of squares that it leaves."""
    sums, squares = np.cumsum(logs), np.square(logs).sum()
    head, tail = sums[places - 1], sums[-1] - sums[places - 1]
    leftover = squares - head**2 / places - tail**2 / (len(logs) - places)
    best = int(np.argmin(leftover))
    place = int(places[best])
    return place, float(head[best] / place), float(tail[best] / (len(logs) - place)), float(leftover[best])


def _square_around_lines(logs: Floats, lines: Sequence[Floats]) -> float:
    """The least sum of squares around a sum of multiples of these lines."""
    rest, columns = logs - logs.mean(), [line - line.mean() for line in lines]
    for number, column in enumerate(columns):
        for each in (rest, *columns[number + 1 :]):
            each -= column * (column @ each) / max(float(column @ column), 1e-300)
    return float(rest @ rest)


def _best_line(logs: Floats, onsets: Ints) -> tuple[int, float, float, float]:
    """The best line that is level up to an onset: the onset, the level, the slope, and the squares that it leaves."""
    steps, mean = np.arange(len(logs), dtype=float), logs.mean()
    best = (0, float(mean), 0.0, float(np.square(logs - mean).sum()))
    for onset in onsets[:: max(1, len(onsets) // 200)].tolist():
        ramp = np.maximum(steps - onset, 0.0)
        middle = ramp.mean()
        spread = ramp - middle
        slope = float(spread @ logs / (spread @ spread))
        level = float(mean - slope * middle)
        leftover = float(np.square(logs - level - slope * ramp).sum())
        if leftover < best[3]:
            best = (onset, level, slope, leftover)
    return best


def _sawtooth(logs: Floats, staleness: Floats | None, median: float, level_chance: float) -> CurveShape | None:
    """Teeth that follow the staleness, or that come back after a fixed number of steps."""
    if staleness is not None and np.isfinite(staleness).all() and len(np.unique(staleness)) > 1:
        tooth = _tooth_by_staleness(logs, staleness)
        if tooth is not None:
            return CurveShape("sawtooth", median, median, level_chance, tooth=tooth)
    teeth = _tooth_by_period(logs)
    if teeth is None:
        return None
    period, tooth = teeth
    return CurveShape("sawtooth", median, median, level_chance, period=period, tooth=tooth)


def _tooth_by_staleness(logs: Floats, staleness: Floats) -> float | None:
    """The level at the oldest weights over that at the newest, where the level surely rises with the staleness. What
    the noise remembers is taken out of both before they are correlated.
    """
    from scipy.stats import pearsonr

    scores = _normal_scores(logs)
    _, memory = _memory_of(scores, len(scores))
    changes, ages = (series[1:] - memory * series[:-1] for series in (scores, staleness))
    correlation = pearsonr(changes, ages)
    if not (correlation.statistic > 0 and correlation.pvalue <= SAWTOOTH_BY_CHANCE):
        return None
    low, high = np.quantile(staleness, [0.25, 0.75])
    tooth = float(np.exp(logs[staleness >= high].mean() - logs[staleness <= low].mean()))
    return tooth if tooth >= LEAST_TOOTH else None


def _tooth_by_period(logs: Floats) -> tuple[int, float] | None:
    """The period whose phases differ most surely, and the highest phase over the lowest; each tooth must rise through
    its phases and fall once.
    """
    from scipy.special import fdtrc

    size = len(logs)
    scores = _normal_scores(logs)
    _, memory = _memory_of(scores, size)
    scores = scores[1:] - memory * scores[:-1]
    best: tuple[float, int] = (1.0, 0)
    longest = min(_MOST_PHASES, size // _FEWEST_TEETH)
    for period in range(2, longest + 1):
        phase = np.arange(size - 1) % period
        counts = np.bincount(phase)
        means = np.bincount(phase, scores) / counts
        between = float(counts @ np.square(means)) / (period - 1)
        within = float(np.square(scores - means[phase]).sum()) / (size - 1 - period)
        chance = float(fdtrc(period - 1, size - 1 - period, between / within)) if within > 0 else 0.0
        if chance < best[0]:
            best = (chance, period)
    chance, period = best
    if period == 0 or chance * longest > SAWTOOTH_BY_CHANCE * 0.1:
        return None
    phase = np.arange(size) % period
    levels = np.bincount(phase, logs) / np.bincount(phase)
    tooth = float(np.exp(levels.max() - levels.min()))
    return (period, tooth) if tooth >= LEAST_TOOTH else None


LEAST_PART: Final = 8
"""Values on either side of a change of level inside a series."""
SURE: Final = 4.5
"""Standard errors by which the levels of both parts differ. A single series is not sure by it: who reads many asks for
several (`reports/planted-logs.md` has how many sound ones of a log lie as far apart)."""
LEVELS: Final = 3.0
"""Times the level of the other part, in geometric means."""
_BENDS: Final = np.linspace(0.1, 0.9, 9)
"""Shares of a series behind which a line can bend: growth that sets in late, or ends early."""


def change_of_level(logs: Floats, courses: Sequence[Floats]) -> tuple[int, float, float] | None:
    """The place of the surest change inside a series of log sizes, by how much they rise there, and by how many nats a
    change is likelier than the likeliest line in one of the courses, in the first with one bend; None without a change.
    """
    place, level, level_behind, leftover = _best_step(logs, np.arange(LEAST_PART, logs.size - LEAST_PART + 1))
    rise, square = level_behind - level, max(leftover, 1e-12)
    errors = abs(rise) * np.sqrt(place * (logs.size - place) / square)
    if errors <= SURE or abs(rise) <= np.log(LEVELS):
        return None
    bent = [[courses[0], np.maximum(courses[0], bend)] for bend in np.quantile(courses[0], _BENDS)]
    of_lines = [_square_around_lines(logs, lines) for lines in [*bent, *([course] for course in courses)]]
    return place, rise, float(np.log(max(min(of_lines), 1e-12) / square)) * logs.size / 2


_RAMP: Final = 48
"""Places over which growth from one level to another extends; over half of them or fewer it is a step."""
_BEFORE_STEP: Final = np.linspace(-_RAMP, 0, 5)
"""Where such growth may begin, beside shares of a course: so many places before the step."""


def step_over_growth(sizes: Floats, is_behind: Mask, courses: Sequence[Ints], rows: Ints) -> float:
    """By how many nats one step in many series of log sizes is likelier than the likeliest growth along a course: a
    line with one bend, one in the course's logarithm, or one from a level to another (`_RAMP`). Each row is a series
    with a level of its own.

    sizes [T]; is_behind: the step [T]; courses: places [T]; rows: which series each is of [T].
    """
    counts = np.maximum(np.bincount(rows), 1)

    def squares(*lines: Floats) -> float:
        own, *others = (each - (np.bincount(rows, each) / counts)[rows] for each in (sizes, *lines))
        return max(_square_around_lines(own, others), 1e-12)

    of_growth = [
        squares(*lines)
        for course in ((each - each.min()).astype(np.float64) for each in courses)
        for ends in [np.quantile(course, [0.0, *_BENDS, 1.0])]
        for lines in [
            (np.log1p(course),),
            *((course, np.maximum(course, bend)) for bend in ends[1:-1]),
            *((course.clip(begin, begin + _RAMP),) for begin in (*ends[:-1], *course[is_behind].min() + _BEFORE_STEP)),
        ]
    ]
    return float(np.log(min(of_growth) / squares(is_behind.astype(np.float64)))) * sizes.size / 2
