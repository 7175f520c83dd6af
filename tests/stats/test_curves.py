"""Shapes of curves: planted ones at three strengths are named, and noise alone is flat."""

from collections import Counter

import numpy as np
import pytest

from mismatch_probe.stats.curves import levels_at_ends, shape_of

SPREAD = 0.3
"""Standard deviation of the logarithm of each value."""


def noise(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """White, with heavy tails on one or both sides, or with a memory."""
    white = rng.standard_normal(size)
    if kind == "heavy":
        return SPREAD * rng.standard_t(2, size)
    if kind == "spikes":
        return SPREAD * (0.3 * white + 2 * np.log1p(rng.pareto(1.5, size)))
    if kind == "white":
        return SPREAD * white
    memory, values = float(kind), np.empty(size)
    values[0] = white[0]
    for place in range(1, size):
        values[place] = memory * values[place - 1] + np.sqrt(1 - memory**2) * white[place]
    return SPREAD * values


NOISES = ("white", "heavy", "spikes", "0.5", "0.8")


def planted(shape: str, fold: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """The logarithm of the level, with a random onset or period."""
    steps, onset = np.arange(size), rng.integers(size // 5, 3 * size // 4)
    if shape == "line":
        return np.log(fold) * steps / (size - 1)
    if shape == "onset":
        return np.log(fold) * np.maximum(steps - onset, 0) / (size - 1 - onset)
    if shape == "step":
        return np.log(fold) * (steps >= onset)
    period = rng.integers(3, 9)
    return np.log(fold) * (steps % period) / (period - 1)


NAMES = {"line": "growing", "onset": "growing", "step": "step_up", "teeth": "sawtooth"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["white", "heavy", "spikes"])
@pytest.mark.parametrize("fold", [3.0, 6.0, 20.0])
@pytest.mark.parametrize("shape", NAMES)
def test_a_planted_shape_is_named(shape: str, fold: float, kind: str) -> None:
    rng = np.random.default_rng(7)
    values = [1e-3 * np.exp(planted(shape, fold, 200, rng) + noise(kind, 200, rng)) for _ in range(40)]
    kinds = Counter(shape_of(curve).kind for curve in values)
    assert kinds[NAMES[shape]] >= (38 if fold > 3 else 32), kinds


@pytest.mark.slow
@pytest.mark.parametrize("size", [20, 60, 200])
def test_noise_alone_does_not_grow(size: int) -> None:
    """Fewer than 1 % of 500 curves are called growing, and fewer than 3 % anything else than flat."""
    rng = np.random.default_rng(11)
    kinds = Counter(shape_of(np.exp(noise(kind, size, rng))).kind for kind in NOISES for _ in range(100))
    assert kinds["growing"] < 5
    assert kinds["flat"] + kinds["unsure"] >= 485, kinds
    assert kinds["unsure"] < 25, kinds


@pytest.mark.parametrize("size", [12, 20, 40])
@pytest.mark.parametrize("direction", [1, -1])
def test_few_smooth_values_that_rise_or_fall_are_no_noise_and_no_teeth(size: int, direction: int) -> None:
    for curve in (np.arange(1, size + 1), 1.1 ** np.arange(size)):
        shape = shape_of(1e-3 * curve[::direction])
        assert shape.kind == ("growing" if direction == 1 else "falling")
        assert max(shape.fold, 1 / shape.fold) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("fold", "spread"), [(3.3, 0.08), (3.3, 0.15), (5.0, 0.08)])
def test_what_rises_from_a_third_of_the_way_on_is_never_flat(fold: float, spread: float) -> None:
    rng = np.random.default_rng(3)
    rise = np.log(fold) * np.maximum(np.arange(60) - 20, 0) / 39
    shapes = [shape_of(1e-3 * np.exp(rise + spread * rng.standard_normal(60))) for _ in range(200)]
    kinds = Counter(shape.kind for shape in shapes)
    assert kinds.keys() <= {"growing", "unsure"}, kinds
    assert kinds["unsure"] > 0
    assert all(shape.fold > 2 for shape in shapes)
    assert {shape_of(np.exp(spread * rng.standard_normal(60))).kind for _ in range(200)} == {"flat"}


@pytest.mark.slow
def test_a_few_values_of_a_random_walk_show_no_sure_change() -> None:
    rng = np.random.default_rng(5)
    kinds = Counter(shape_of(np.exp(np.cumsum(0.1 * rng.standard_normal(20)))).kind for _ in range(500))
    assert kinds["flat"] + kinds["unsure"] >= 480, kinds


def test_a_step_and_growth_are_placed() -> None:
    rng = np.random.default_rng(0)
    step = shape_of(np.exp(np.log(8) * (np.arange(100) >= 40) + noise("white", 100, rng)))
    assert abs(step.place - 40) <= 1
    assert step.fold == pytest.approx(8, rel=0.3)
    growth = shape_of(np.exp(np.log(50) * np.maximum(np.arange(100) - 60, 0) / 39 + noise("white", 100, rng)))
    assert growth.kind == "growing"
    assert abs(growth.place - 60) <= 8
    assert growth.fold == pytest.approx(50, rel=0.5)


def test_what_falls_is_no_growth() -> None:
    rng = np.random.default_rng(1)
    assert shape_of(np.exp(-planted("line", 20, 100, rng) + noise("white", 100, rng))).kind == "falling"
    assert shape_of(np.exp(-planted("step", 20, 100, rng) + noise("white", 100, rng))).kind == "step_down"


def test_teeth_that_follow_the_staleness_are_named_without_a_period() -> None:
    rng = np.random.default_rng(2)
    ages = np.concatenate([np.arange(size) for size in rng.integers(2, 7, 40)])[:120].astype(float)
    shape = shape_of(np.exp(0.4 * ages + noise("white", 120, rng)), ages)
    assert (shape.kind, shape.period) == ("sawtooth", None)
    assert shape.tooth > 2
    assert shape_of(np.exp(noise("white", 120, rng)), ages).kind == "flat"


def test_few_or_no_values_have_no_shape() -> None:
    assert shape_of(np.ones(5)).kind == "too_short"
    assert shape_of(np.zeros(50)).kind == "too_short"
    assert shape_of(np.ones(50)).kind == "flat"


def test_the_ends_of_a_curve_of_any_sign_are_its_levels_where_it_changes() -> None:
    rng = np.random.default_rng(3)
    noisy = rng.normal(0, 1e-3, 60)
    first, last = levels_at_ends(noisy + np.linspace(0, 0.5, 60))
    assert first == pytest.approx(0, abs=0.02)
    assert last == pytest.approx(0.5, abs=0.02)
    assert levels_at_ends(noisy) == (np.median(noisy), np.median(noisy))
    assert levels_at_ends(np.array([0.0, 5.0])) == (2.5, 2.5)


def test_a_level_is_never_beyond_what_was_logged_of_a_curve_that_bends() -> None:
    rising = 1e-3 + 0.7 / (1 + np.exp(-(np.arange(40) - 25) / 2))
    shape = shape_of(rising)
    assert shape.kind in ("growing", "step_up")
    assert rising[0] <= shape.first_level <= shape.last_level <= rising[-1]
