import numpy as np
import pytest
from scipy.stats import norm

from mismatch_probe.gate.claims import declared_looks, fractions_so_far, look_number, nominal_level, spent_alpha

FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize(("look", "boundary"), [(1, 2.4380), (2, 2.4268), (3, 2.4101), (4, 2.3966), (5, 2.3859)])
def test_nominal_levels_are_those_published_for_five_looks(look: int, boundary: float) -> None:
    """Pocock-type spending of a one-sided 0.025 [Lan and DeMets 1983; the tables of the R package ldbounds]."""
    assert norm.isf(nominal_level(0.025, FIFTHS[:look])) == pytest.approx(boundary, abs=3e-4)


def test_a_single_look_spends_everything() -> None:
    assert nominal_level(0.05, (1.0,)) == pytest.approx(0.05, rel=1e-9)
    assert spent_alpha(0.05, 1.0) == pytest.approx(0.05)


@pytest.mark.slow
def test_all_looks_together_err_as_often_as_was_spent() -> None:
    fractions = (0.25, 0.5, 1.0)
    random = np.random.default_rng(1)
    steps = random.normal(size=(400_000, 3)) * np.sqrt(np.diff(fractions, prepend=0))
    scores = np.cumsum(steps, axis=1) / np.sqrt(fractions)
    levels = [nominal_level(0.05, fractions[:look]) for look in (1, 2, 3)]
    crossed = (norm.sf(scores) <= levels).any(axis=1).mean()
    assert crossed == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 / 400_000))


def test_testing_at_alpha_at_every_look_would_err_far_more_often() -> None:
    levels = [nominal_level(0.05, (0.25, 0.5, 1.0)[:look]) for look in (1, 2, 3)]
    assert max(levels) < 0.03


@pytest.mark.parametrize(
    ("low", "high", "looks"),
    [(256, 256, [256]), (256, 1024, [256, 512, 1024]), (256, 1100, [256, 512, 1100]), (100, 150, [100, 150])],
)
def test_looks_double_up_to_the_last(low: int, high: int, looks: list[int]) -> None:
    assert declared_looks(low, high) == looks


def test_a_sample_is_at_one_look_however_often_it_is_gated() -> None:
    looks = [256, 512, 1024]
    assert [look_number(looks, size) for size in (255, 256, 511, 512, 1024, 5000)] == [0, 1, 1, 2, 3, 3]
    assert fractions_so_far(looks, 256) == (0.25,)
    assert fractions_so_far(looks, 600) == (0.25, 600 / 1024)
    assert fractions_so_far(looks, 5000) == (0.25, 0.5, 1.0)
    assert fractions_so_far(looks, 100) == (100 / 1024,)


def test_fractions_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ValueError, match="do not rise"):
        nominal_level(0.05, (0.5, 0.5))
