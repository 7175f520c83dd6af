"""Which hypothesis explains a side: the simplest that reaches the floor, one departure or two, or none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mismatch_probe.explain.bench import SideBench, Tried
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.formats import LEAST_TIMES
from mismatch_probe.explain.hypotheses import Family
from mismatch_probe.verdict.codes import Code

REACHES_FLOORS: Final = 2.0
"""Residuals of so many times the floor or less are explained: an engine rounds otherwise than the training path."""
LEAST_SCORES: Final = 4.0
LEAST_EXPLAINED: Final = 0.1
LEAST_SCORES_UNFITTED: Final = 2.5
LEAST_EXPLAINED_UNFITTED: Final = 0.25
"""Where no parameter was fitted and much is explained, a few responses may decide, as experts that are taken otherwise
do."""
_BETTER_SCORES: Final = 3.0
_LEADING: Final = 2


@dataclass(frozen=True)
class Found:
    """As declared, every hypothesis that was tried, best first, and the accepted one; None where nothing explains."""

    null: Tried
    tried: list[Tried]
    explained_by: Tried | None


def search(bench: SideBench, families: Iterable[Family]) -> Found:
    """Try every family alone; where none reaches the floor, try the best of them in twos."""
    null = bench.null()
    singles = _all_tried(bench, [(family,) for family in families], null, "hypothesis")
    best = _simplest(bench, [tried for tried in singles if _is_accepted(bench, tried, null)])
    pairs: list[Tried] = []
    if best is None and not reaches(null):
        pairs = _pairs(bench, singles, null)
        best = _simplest(bench, [tried for tried in pairs if _is_accepted(bench, tried, null)])
    if best is None and reaches(null):
        best = null
    ranked = sorted([*singles, *pairs], key=lambda tried: -tried.trial.standard_scores)
    return Found(null, sorted(ranked, key=lambda tried: tried is not best), best)


def _all_tried(bench: SideBench, hypotheses: Sequence[tuple[Family, ...]], null: Tried, called: str) -> list[Tried]:
    """Those that say something else than the declared settings."""
    all_tried = []
    for number, families in enumerate(hypotheses, 1):
        bench.tell(f"{called} {number} of {len(hypotheses)}")
        all_tried.append(bench.tried(families, null))
    return [tried for tried in all_tried if not bench.judge.same(tried.account, null.account)]


def reaches(tried: Tried) -> bool:
    return tried.trial.residual_floors <= REACHES_FLOORS


def _is_accepted(bench: SideBench, tried: Tried, null: Tried) -> bool:
    """Whether it reaches the floor and says more of the side than its declared settings do."""
    if not reaches(tried) or not bench.is_rounding(tried):
        return False
    scores, explained = tried.trial.standard_scores, tried.trial.explained
    if all(family.part == "format" for family in tried.families):
        return scores >= LEAST_SCORES and not LEAST_TIMES <= null.trial.residual_floors <= REACHES_FLOORS
    unfitted = tried.num_fitted == 0 and scores >= LEAST_SCORES_UNFITTED and explained >= LEAST_EXPLAINED_UNFITTED
    return unfitted or (scores >= LEAST_SCORES and explained >= LEAST_EXPLAINED)


def _simplest(bench: SideBench, tried: Sequence[Tried]) -> Tried | None:
    """The simplest, unless one that fits more parameters is better beyond doubt."""
    ordered = sorted(
        tried, key=lambda candidate: (len(candidate.families), candidate.num_fitted, -candidate.trial.standard_scores)
    )
    best: Tried | None = None
    for candidate in ordered:
        if best is None or bench.judge.standard_scores(candidate.account, best.account) >= _BETTER_SCORES:
            best = candidate
    return best


def _pairs(bench: SideBench, singles: Sequence[Tried], null: Tried) -> list[Tried]:
    """The best alone with everything that changes another part.

    A temperature stays at first what it was alone; with the best partners it is fitted again.
    """
    shown = [tried for tried in singles if tried.trial.standard_scores >= LEAST_SCORES]
    leading = sorted(shown, key=lambda tried: -tried.trial.standard_scores)[:_LEADING]
    hypotheses = {
        frozenset((tried.families[0].name, other.families[0].name)): (_as_alone(tried), _as_alone(other))
        for tried in leading
        for other in singles
        if tried.families[0].part != other.families[0].part
    }
    together = _all_tried(bench, list(hypotheses.values()), null, "two hypotheses together,")
    ranked = sorted(together, key=lambda tried: -tried.trial.standard_scores)
    again = [_with_free_temperature(tried) for tried in ranked[:_LEADING]]
    return [*ranked, *_all_tried(bench, [tried for tried in again if tried], null, "the best two fitted again,")]


def _as_alone(tried: Tried) -> Family:
    """A family whose temperature, if it has one, is what was fitted; of what takes a pass each, what was chosen."""
    (family,), (option,), (departure,) = tried.families, tried.options, tried.trial.departures
    if not family.free_temperature:
        return family if family.part == "distribution" else replace(family, options=(option,))
    fixed = replace(option, departure=departure, distribution=Distribution(temperature=departure.value))
    return Family(family.name, family.part, (fixed,))


def _with_free_temperature(tried: Tried) -> tuple[Family, ...]:
    """The same families with the temperature free and the rest as it was chosen; none where that cannot be fitted."""
    fixed = [option.departure.code == Code.TEMPERATURE for option in tried.options]
    if not any(fixed) or any(family.chosen_for == "response" for family in tried.families):
        return ()
    return tuple(
        replace(family, options=(replace(option, distribution=None),), free_temperature=True)
        if is_temperature
        else replace(family, options=(option,))
        for family, option, is_temperature in zip(tried.families, tried.options, fixed, strict=True)
    )
