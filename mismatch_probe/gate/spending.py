"""Looks declared in advance, and the error budget split over them (alpha spending).

At information fraction t the budget spent is alpha ln(1 + (e - 1) t), Lan and DeMets' Pocock-type function [Lan and
DeMets 1983, Biometrika 70:659]. Each look's nominal level follows from the joint normal law of the statistics at all
looks so far, integrated look by look [Armitage, McPherson and Rowe 1969, JRSS A 132:235].
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import optimize, special

from mismatch_probe.stats.sequences import Floats

LEAST_STEP = 1.5
"""A look needs this many times the sequences of the one before."""

_NODES = 128
_TAIL = 9.0
_HIGHEST = 12.0


def declared_looks(min_sequences: int, max_sequences: int) -> list[int]:
    """Numbers of sequences at which the gate may look: doubling, and a last step of at least LEAST_STEP.

    >>> declared_looks(256, 1100)
    [256, 512, 1100]
    """
    looks = [min_sequences]
    while looks[-1] * 2 * LEAST_STEP <= max_sequences:
        looks.append(looks[-1] * 2)
    return looks if looks[-1] == max_sequences else [*looks, max_sequences]


def look_number(looks: Sequence[int], num_sequences: int) -> int:
    """How many of the declared looks a sample of this size has reached; 0 when it is too small for the first."""
    return sum(num_sequences >= look for look in looks)


def fractions_so_far(looks: Sequence[int], num_sequences: int) -> tuple[float, ...]:
    """Information fractions of the looks up to the current one, which counts at its real size.

    Looks before are taken as made, whether the sample came in one go or grew: a sample is at one look only, however
    often it is gated.
    """
    before = looks[: max(look_number(looks, num_sequences) - 1, 0)]
    return (*(look / looks[-1] for look in before), min(num_sequences / looks[-1], 1.0))


def spent(alpha: float, fraction: float) -> float:
    """Error budget spent up to an information fraction."""
    return alpha * math.log(1 + (math.e - 1) * fraction)


@cache
def nominal_level(alpha: float, fractions: tuple[float, ...]) -> float:
    """One-sided level at which the last of these looks tests, so that all together err at most as often as was spent.

    Raises:
        ValueError: the fractions do not rise within (0, 1].
    """
    if not all(low < high for low, high in zip((0.0, *fractions), fractions, strict=False)) or fractions[-1] > 1:
        raise ValueError(f"information fractions {fractions} do not rise within (0, 1]")
    points, weights = np.zeros(1), np.ones(1)
    before = done = 0.0
    for fraction in fractions:
        budget = spent(alpha, fraction) - done
        step = math.sqrt(fraction - before)
        bound = _bound(points, weights, step, budget, fraction)
        points, weights = _continued(points, weights, step, bound, fraction)
        before, done = fraction, done + budget
    return float(special.ndtr(-bound / math.sqrt(fractions[-1])))


def _bound(points: Floats, weights: Floats, step: float, budget: float, fraction: float) -> float:
    """The value of the score process that it crosses with probability `budget` at this look and at none before."""

    def excess(bound: float) -> float:
        return float(weights @ special.ndtr((points - bound) / step)) - budget

    return float(optimize.brentq(excess, 0.0, _HIGHEST * math.sqrt(fraction), xtol=1e-12))


@cache
def _nodes_and_weights() -> tuple[Floats, Floats]:
    """Of Gauss and Legendre, on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


def _continued(points: Floats, weights: Floats, step: float, bound: float, fraction: float) -> tuple[Floats, Floats]:
    """The law of the score process among paths that have not crossed, as weighted points (Gauss-Legendre)."""
    low = -_TAIL * math.sqrt(fraction)
    nodes, node_weights = _nodes_and_weights()
    new_points = low + (nodes + 1) / 2 * (bound - low)
    kernel = np.exp(-(((new_points[:, None] - points) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
    return new_points, kernel @ weights * node_weights * (bound - low) / 2
