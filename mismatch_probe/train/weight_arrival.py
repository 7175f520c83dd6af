"""Did every weight arrive? The engine's weights before and after a sync, by digest, against what was sent."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mismatch_probe.engines.base import Engine, HeldWeight
from mismatch_probe.train.distributed import gathered

Metrics = dict[str, float]
Digests = tuple[int, ...]

_NAMED: Final = 5

logger = logging.getLogger(__name__)


@dataclass
class _Remembered:
    """Of one weight of one engine: its workers' digests, and those of the tensors that it took last."""

    held: Digests
    took: Digests | None = None


@dataclass
class WeightArrival:
    """Compares after each sync. `comparable`: weights that were once, digest by digest, what was sent."""

    engine: Engine
    ranks_an_engine: int = 1
    comparable: set[str] = field(default_factory=set)
    _remembered: dict[tuple[int, str], _Remembered] = field(default_factory=dict)
    _is_told: bool = False

    def look(self) -> None:
        """Remember what the engine holds before it is sent anything: what it loaded from the checkpoint itself."""
        if not self._remembered:
            for place, engine in enumerate(self._read(())):
                for name, workers in engine.items():
                    self._remembered[place, name] = _Remembered(_digests(workers))

    def check(self, sent: Mapping[str, int]) -> Metrics:
        """After the tensors with these digests were sent.

        `sync/weights_unchanged` is the number of the engine's weights that hold what they held, although other numbers
        were sent; `sync/weights_other` that of the others that do not hold the numbers sent; `sync/weights_compared`
        the share of the engine's numbers that can be compared with those sent. None of an engine that cannot say what
        it holds.
        """
        unchanged, other, sizes = set(), set(), dict[str, int]()
        for place, engine in enumerate(self._read(list(sent))):
            for name, workers in engine.items():
                before = self._remembered.setdefault((place, name), _Remembered(_digests(workers)))
                parts = tuple(sent[part] for part in workers[0].made_of)
                arrived = _holds(_digests(workers), workers[0], sent)
                if arrived or _holds(before.held, workers[0], sent):
                    self.comparable.add(name)
                if not arrived and before.took not in (None, parts) and before.held == _digests(workers):
                    unchanged.add(name)
                else:
                    before.took = parts
                    if name in self.comparable and not arrived:
                        other.add(name)
                before.held = _digests(workers)
                sizes[name] = sum(worker.num_elements for worker in workers)
        if not sizes:
            return {}
        if not self._is_told:
            _warn("cannot be compared with what is sent, number by number", sizes.keys() - self.comparable)
            self._is_told = True
        _warn("hold what they held before other numbers were sent", unchanged)
        _warn("hold other numbers than were sent", other - unchanged)
        compared = sum(size for name, size in sizes.items() if name in self.comparable)
        return {
            "sync/weights_unchanged": float(len(unchanged)),
            "sync/weights_other": float(len(other - unchanged)),
            "sync/weights_compared": compared / sum(sizes.values()),
        }

    def _read(self, names: Sequence[str]) -> list[dict[str, list[HeldWeight]]]:
        """Of every engine: each weight on each of its workers that hold it."""
        ranks = gathered([self.engine.held_weights(names)])
        engines = []
        for start in range(0, len(ranks), self.ranks_an_engine):
            workers = [worker for rank in ranks[start : start + self.ranks_an_engine] for worker in rank]
            held = dict.fromkeys(name for worker in workers for name in worker)
            engines.append({name: [worker[name] for worker in workers if name in worker] for name in held})
        return engines


def _digests(workers: Sequence[HeldWeight]) -> Digests:
    return tuple(worker.digest for worker in workers)


def _holds(held: Digests, weight: HeldWeight, sent: Mapping[str, int]) -> bool:
    """Whether all workers together hold the tensors that the weight is made of, or each of them does."""
    if not weight.made_of:
        return False
    shared = sum(copies * sent[name] for name, copies in weight.made_of.items())
    whole = sum(sent[name] for name in weight.made_of)
    return sum(held) == shared or all(digest == whole for digest in held)


def _warn(what: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        logger.warning("%d of the engine's weights %s: %s", len(names), what, listed)
