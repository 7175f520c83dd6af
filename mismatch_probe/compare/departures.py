"""Each logged side of a pair set against the reference: that of the checkpoint it was scored with, or the log's own."""

from collections.abc import Mapping
from typing import Final

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, TokenPair, difference
from mismatch_probe.verdict.departures import Departures, apart_floors, floors_of
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.disagreement import Disagreement

_LOGGED: Final = {"pi": "log_pi", "mu": "log_mu"}


def departures(
    settings: CompareSettings,
    name: PairName,
    data: Mapping[PairName, PairData],
    judged: Mapping[PairName, Disagreement],
) -> Departures | None:
    """None where the pair has no logged sampler, or no reference was recorded."""
    pi, mu = settings.pi(name[0]), settings.mu(name[1])
    if not mu.logged or data[name].pair is None:
        return None
    logged = next((pair for pair in settings.pairs if settings.pi(pair[0]).logged and pair[1] == name[1]), None)
    scored = next((pair for pair in settings.pairs if not settings.pi(pair[0]).logged and pair[1] == name[1]), None)
    if scored is not None:
        return _from_checkpoint(settings, name, scored, logged, data, judged)
    pair = data[name].pair
    return None if pair is None or pair.log_ref is None else _from_each_other(pair, pi, mu, settings.confidence)


def _from_checkpoint(
    settings: CompareSettings,
    name: PairName,
    scored: PairName,
    logged: PairName | None,
    data: Mapping[PairName, PairData],
    judged: Mapping[PairName, Disagreement],
) -> Departures | None:
    """The unit is the error of the training path here; the trainer's side is looked at where the log has one."""
    ours, level = data[scored].pair, settings.confidence
    if ours is None or ours.log_ref is None:
        return None
    pi, mu = settings.pi(scored[0]), settings.mu(scored[1])
    measured = difference(ours.log_pi, ours.log_ref), pi.dtype
    dtypes = {"mu": mu.dtype}
    floors = {
        "mu": floors_of(difference(ours.log_mu, ours.log_ref), ours.log_ref, measured, mu.dtype, ours.sequences, level)
    }
    apart = None
    theirs = None if logged is None else data[logged].pair
    if logged is not None and theirs is not None and theirs.log_ref is not None:
        if theirs.log_ref.shape != ours.log_ref.shape:
            return None
        dtypes["pi"] = settings.pi(logged[0]).dtype
        error = difference(theirs.log_pi, theirs.log_ref)
        floors["pi"] = floors_of(error, theirs.log_ref, measured, dtypes["pi"], theirs.sequences, level)
        apart = apart_floors(theirs.log_pi, theirs.log_mu, theirs.log_ref, measured, dtypes, theirs.sequences, level)
    is_named = bool(signatures(judged[scored]))
    sides = ("pi", "mu") if name == logged else ("mu",)
    return Departures(sides, _known(floors), dtypes, apart, from_checkpoint=True, is_named=is_named)


def _from_each_other(pair: TokenPair, pi: Side, mu: Side, level: float) -> Departures:
    """The unit of each side is the error of the other."""
    assert pair.log_ref is not None
    errors: dict[str, Floats] = {
        side: difference(getattr(pair, column), pair.log_ref) for side, column in _LOGGED.items()
    }
    dtypes: dict[str, Dtype] = {"pi": pi.dtype, "mu": mu.dtype}
    others = {"pi": "mu", "mu": "pi"}
    floors = {
        side: floors_of(errors[side], pair.log_ref, (errors[other], dtypes[other]), dtypes[side], pair.sequences, level)
        for side, other in others.items()
    }
    return Departures(("pi", "mu"), _known(floors), dtypes, None, from_checkpoint=False)


def _known(floors: dict[str, Estimate | None]) -> dict[str, Estimate]:
    return {side: estimate for side, estimate in floors.items() if estimate is not None}
