"""Which hypothesis explains a side: the simplest that reaches the floor, one departure or two, or none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from mismatch_probe.explain.bench import SideBench, Tried
from mismatch_probe.explain.hypotheses import Family

REACHES_FLOORS: Final = 2.0
"""Residuals of so many times the floor or less are explained: an engine rounds otherwise than the training path."""
LEAST_SCORES: Final = 4.0
LEAST_EXPLAINED: Final = 0.1
_BETTER_SCORES: Final = 3.0
_PARTNERS: Final = 4


@dataclass(frozen=True)
class Found:
    """as declared, every hypothesis that was tried, best first, and the accepted one; None where nothing explains."""

    null: Tried
    tried: list[Tried]
    explained_by: Tried | None


def search(bench: SideBench, families: Iterable[Family]) -> Found:
    """Try every family alone; where none reaches the floor, try the best of them in twos."""
    null = bench.null()
    singles = [bench.tried((family,), null) for family in families]
    best = _simplest(bench, [one for one in singles if is_shown(one) and reaches(one)])
    pairs: list[Tried] = []
    if best is None and not reaches(null):
        pairs = [bench.tried(pair, null) for pair in _in_twos(singles)]
        best = _simplest(bench, [one for one in pairs if is_shown(one) and reaches(one)])
    if best is None and reaches(null):
        best = null
    ranked = sorted([*singles, *pairs], key=lambda one: -one.trial.standard_scores)
    return Found(null, sorted(ranked, key=lambda one: one is not best), best)


def reaches(tried: Tried) -> bool:
    return tried.trial.residual_floors <= REACHES_FLOORS


def is_shown(tried: Tried) -> bool:
    """Whether it says more of the side than its declared settings do."""
    return tried.trial.standard_scores >= LEAST_SCORES and tried.trial.explained >= LEAST_EXPLAINED


def _simplest(bench: SideBench, tried: Sequence[Tried]) -> Tried | None:
    """The simplest, unless one that fits more parameters is better beyond doubt."""
    ordered = sorted(tried, key=lambda one: (len(one.families), one.num_fitted, -one.trial.standard_scores))
    best: Tried | None = None
    for one in ordered:
        if best is None or bench.judge.standard_scores(one.account, best.account) >= _BETTER_SCORES:
            best = one
    return best


def _in_twos(singles: Sequence[Tried]) -> list[tuple[Family, Family]]:
    partners = sorted(singles, key=lambda one: -one.trial.standard_scores)
    families = [one.families[0] for one in partners if one.trial.standard_scores > LEAST_SCORES][:_PARTNERS]
    return [(one, other) for one, other in combinations(families, 2) if one.part != other.part]
