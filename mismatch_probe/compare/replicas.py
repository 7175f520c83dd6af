"""Servers that are replicas of each other are compared: whether all are one policy, and which one is not.

Each replica is a side of its own and differs from the others only in its address. The settings that they report must be
equal, and so must their answers to one probe: within a limit that rounding does not exceed they are one policy, and
within their own noise they have the same weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.server.answers import LEAST_MOVE, TIMES_ITS_NOISE, other_answer
from mismatch_probe.notation import write_estimate, write_number
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import PairSummary, SettingFinding
from mismatch_probe.stats.estimator import contrast

_DECLARED_FIELDS: Final = ("software", "dtype", "weight_version")
_NOISE: Final = ("again", "in_a_crowd", "behind_the_cache")
_DISTANCE: Final = "abs_logprob_diff"


@dataclass(frozen=True)
class Replica:
    """A server's side and its effective settings."""

    side: Side
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.side.name

    @property
    def noise(self) -> float | None:
        """The nats by which its log-probs differ between equal requests; None where it was not measured."""
        return max((value for name in _NOISE if (value := self.settings["asked"].get(name)) is not None), default=None)

    def departs_from(self, other: "Replica") -> str | None:
        """The difference that shows that the two are not one policy; None where there is none."""
        for name in _DECLARED_FIELDS:
            mine, its = self.settings.get(name), other.settings.get(name)
            if mine != its:
                return f"{name} is {mine}, and {its} of {other.name}"
        noise = max(self.noise or 0.0, other.noise or 0.0)
        return other_answer(_probe_answer(other), _probe_answer(self), max(LEAST_MOVE, TIMES_ITS_NOISE * noise))

    def moved_from(self, other: "Replica") -> str | None:
        """The deviation of its answer beyond the noise of both replicas; None where there is none."""
        if self.noise is None or other.noise is None:
            return None
        return other_answer(_probe_answer(other), _probe_answer(self), TIMES_ITS_NOISE * max(self.noise, other.noise))


def replica_findings(manifest: Manifest, pairs: Sequence[PairSummary]) -> list[SettingFinding]:
    """A finding for each replica that is another policy than the majority, or one finding that all are equal."""
    return [finding for replicas in _groups_of_replicas(manifest) for finding in _findings_of_group(replicas, pairs)]


def _groups_of_replicas(manifest: Manifest) -> Iterator[list[Replica]]:
    groups: list[list[Replica]] = []
    for side in manifest.settings.infer_sides:
        settings = manifest.stages[side.stage("sample")].effective_settings
        if side.engine is None or not side.engine.is_remote or not isinstance(settings.get("asked"), dict):
            continue
        replica = Replica(side, settings)
        group = next((group for group in groups if _is_replica(side, group[0].side)), None)
        if group is None:
            groups.append([replica])
        else:
            group.append(replica)
    yield from (group for group in groups if len(group) > 1)


def _is_replica(side: Side, other: Side) -> bool:
    differing = [setting.partition(" = ")[0] for setting in side.differs_from(other)]
    return side.dtype == other.dtype and differing == ["url"]


def _findings_of_group(replicas: Sequence[Replica], pairs: Sequence[PairSummary]) -> Iterator[SettingFinding]:
    alike = {
        replica.name: [other.name for other in replicas if replica.departs_from(other) is None] for replica in replicas
    }
    largest = max(len(names) for names in alike.values())
    if largest == len(replicas):
        yield _replicas_off_the_majority(replicas) or _finding_of_agreement(replicas)
    elif 2 * largest > len(replicas):
        majority = next(names for names in alike.values() if len(names) == largest)
        first = next(replica for replica in replicas if replica.name == majority[0])
        for replica in replicas:
            if replica.name not in majority:
                yield _departure_finding(replica, first, f"its replicas {', '.join(majority)} agree")
    else:
        yield from _finding_without_majority(replicas, alike, pairs)


def _finding_without_majority(
    replicas: Sequence[Replica], alike: dict[str, list[str]], pairs: Sequence[PairSummary]
) -> Iterator[SettingFinding]:
    """The finding without a majority, as with two that differ: the distance from the training path may decide."""
    first = min(replicas, key=lambda replica: _distance_from_training_path(replica, pairs))
    for replica in replicas:
        if replica.name in alike[first.name]:
            continue
        farther = _distance_ratio(replica, first, pairs)
        why = (
            "which of the two is off is not known"
            if farther is None
            else f"its log-probs lie {farther} times as far from the training path's"
        )
        yield _departure_finding(replica, first, why)


def _departure_finding(replica: Replica, first: Replica, why: str) -> SettingFinding:
    return SettingFinding(
        level="error",
        side="mu",
        setting="replicas",
        what=(
            f"{replica.name} is another policy than its replica {first.name}: {_departure_text(replica, first)}; {why}"
        ),
        advice=f"Bring the server of {replica.name} to the weights and settings of the others, then compare again.",
        code=Code.STALE_WEIGHTS,
    )


def _departure_text(replica: Replica, first: Replica) -> str:
    how = replica.departs_from(first) or "its answers"
    return how if " is " in how else f"it answers one question otherwise ({how})"


def _replicas_off_the_majority(replicas: Sequence[Replica]) -> SettingFinding | None:
    """The replicas whose answers differ from the majority's; None where all agree."""
    agreeing = max(
        ([other for other in replicas if replica.moved_from(other) is None] for replica in replicas), key=len
    )
    deviating = [replica for replica in replicas if replica not in agreeing]
    if not deviating:
        return None
    majority = ", ".join(replica.name for replica in agreeing)
    moves = ", ".join(f"{replica.name} {replica.moved_from(agreeing[0])}" for replica in deviating)
    return SettingFinding(
        level="warning",
        side="mu",
        setting="replicas",
        what=f"one question is answered a little otherwise than by {majority}: {moves}; "
        "a small step of training does that, and so do other hardware and other kernels",
        advice="Have the trainer label its updates, and see that all replicas hold the newest weights on the same "
        "hardware.",
    )


def _finding_of_agreement(replicas: Sequence[Replica]) -> SettingFinding:
    names, least = ", ".join(replica.name for replica in replicas), _least_noise(replicas)
    alike = (
        ": replicas of one policy, but for weights that move a likely token's log-prob by less than "
        f"{write_number(least)} nats"
        if least
        else ", with the same bits, as each of them does again and again: replicas of one policy"
    )
    return SettingFinding(
        level="note",
        side="mu",
        setting="replicas",
        what=f"{names} say the same of themselves and answer one question alike{alike}",
        advice="Where their rows differ more than their intervals, look at each server.",
    )


def _least_noise(replicas: Sequence[Replica]) -> float:
    """The nats by which an answer must differ to be seen; 0 where any bit is seen."""
    noises = [replica.noise for replica in replicas if _probe_answer(replica)]
    measured_noises = [noise for noise in noises if noise is not None]
    return TIMES_ITS_NOISE * max(measured_noises) if len(measured_noises) == len(replicas) else LEAST_MOVE


def _distance_from_training_path(replica: Replica, pairs: Sequence[PairSummary]) -> float:
    return max(
        (pair.metrics[_DISTANCE].value for pair in pairs if pair.infer == replica.name and _DISTANCE in pair.metrics),
        default=float("inf"),
    )


def _distance_ratio(replica: Replica, first: Replica, pairs: Sequence[PairSummary]) -> str | None:
    """The ratio of the two distances, where it is certainly above 1."""
    of_first = {pair.train: pair for pair in pairs if pair.infer == first.name}
    for pair in pairs:
        first_distances = of_first.get(pair.train)
        if pair.infer != replica.name or first_distances is None:
            continue
        if not all(_DISTANCE in either.metrics for either in (pair, first_distances)):
            continue
        ratio = contrast(pair.metrics[_DISTANCE], first_distances.metrics[_DISTANCE])
        if ratio is not None and ratio.low is not None and ratio.low > 1:
            return str(write_estimate(ratio))
    return None


def _probe_answer(replica: Replica) -> dict[int, float]:
    answer = replica.settings.get("standing_answer")
    return {int(token_id): float(value) for token_id, value in answer.items()} if isinstance(answer, dict) else {}
