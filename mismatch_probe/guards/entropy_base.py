"""Whether entropies are in another base than e by several steps together, each of which may have too few tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, Final, Self

from mismatch_probe.guards.base_totals import BaseTotals, Moments, NearTotals, base_metrics
from mismatch_probe.guards.sums import Metrics, Sums
from mismatch_probe.stats.bases import BASES, FEWEST_FOR_ENTROPIES, OtherBase, entropies_differ, errors_from_0
from mismatch_probe.stats.sequences import Floats

_MOST_STEPS: Final = 128
"""As many as the guard `sampling` adds up."""
_BLOCKS_OF_A_SIZE: Final = 3
_OF_SURPRISE: Final = "mismatch/surprise_"
_BEFORE: Final = 1 + 2 * len(BASES) * len(fields(NearTotals))
_SURPRISE: Final = slice(_BEFORE, _BEFORE + len(fields(Moments)))
"""Where the array of `BaseTotals` holds `surprise`."""

Block = tuple[int, Floats]
"""A number of steps, and the array of the sums of their `BaseTotals`."""


class EntropyBase:
    """Whether the entropies, or both sides, are in another base, by the last steps together.

    blocks: of 1, 1, 1, 2, 2, 2, 4, ... steps the sums, the newest first. The newest blocks whose mean of log p + H is
    the most standard errors from 0 are looked at, those since what they show began, and fewer of them, in case that it
    began within the oldest. base: None where they are in nats, or cannot be told; it stays until the newest blocks say
    that they are in nats. is_open: they differ from log p, and more tokens may tell of a base.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks = list(blocks)
        self.base: OtherBase | None = None
        self.is_open = False

    def measured(self, sums: Sums) -> tuple[Metrics, tuple[str, ...]]:
        """Takes a step in: its metrics, and what is withheld of them. Entropies in another base are not used; while
        that is open, the surprise that follows from them is withheld.
        """
        self.take(sums.bases)
        metrics, withheld = sums.metrics(), sums.withheld
        if self.base is not None:
            bases = {name: base for name, base in base_metrics(self.base).items() if base}
            return sums.without_entropies().metrics() | bases, withheld
        held = [name for name in metrics if self.is_open and name.startswith(_OF_SURPRISE)]
        return {name: value for name, value in metrics.items() if name not in held}, (*withheld, *held)

    def take(self, totals: BaseTotals) -> None:
        """Takes a step in; one without entropies says nothing."""
        self.is_open = False
        if not totals.surprise.count:
            return
        self.blocks = list(_merged([(1, totals.to_array()), *self.blocks]))
        sums = list(accumulate(numbers for _, numbers in self.blocks))
        if self.base is not None:
            self._look_for_nats(sums)
            return
        errors = [errors_from_0(numbers[_SURPRISE]) for numbers in sums]
        since = errors.index(max(errors))
        if not entropies_differ(sums[since][_SURPRISE]):
            return
        fewest = sums[since][_SURPRISE][0] / 2
        looked_at = [BaseTotals.of_array(numbers) for numbers in sums[since::-1] if numbers[_SURPRISE][0] >= fewest]
        bases = [base for each in looked_at if (base := each.base) is not None and base.column in ("both", "entropy")]
        self.base = next(iter(bases), None)
        self.is_open = self.base is None and any(each.entropies.is_open for each in looked_at)

    def _look_for_nats(self, sums: Sequence[Floats]) -> None:
        """Forgets the base, and the steps before, where the newest blocks with enough tokens are in nats."""
        enough = next((end for end, each in enumerate(sums) if each[_SURPRISE][0] >= FEWEST_FOR_ENTROPIES), None)
        if enough is not None and BaseTotals.of_array(sums[enough]).entropies.are_nats:
            self.base, self.blocks = None, self.blocks[: enough + 1]

    def state(self) -> dict[str, Any]:
        """JSON values."""
        base = None if self.base is None else [self.base.column, self.base.base]
        return {"base": base, "blocks": [[steps, numbers.tolist()] for steps, numbers in self.blocks]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """
        Raises:
            UsageError: a block is none.
            ValueError: its number of steps is none, or its sums are of no tokens; or the base is none.
        """
        blocks = [(steps, BaseTotals.of_array(numbers)) for steps, numbers in state.get("blocks", ())]
        if any(type(steps) is not int or steps < 1 or totals.impossible() for steps, totals in blocks):
            raise ValueError("the sums that tell a base are of no steps")
        seen = cls((steps, totals.to_array()) for steps, totals in blocks)
        base = state.get("base")
        if base is not None and (len(base) != 2 or base[0] not in ("both", "entropy") or base[1] not in BASES):
            raise ValueError("there is no such base")
        seen.base = None if base is None else OtherBase(*base)
        return seen


def _merged(blocks: Iterable[Block]) -> Iterator[Block]:
    """Of each size three at most, as older ones become one of twice the size; the newest first, of `_MOST_STEPS`."""
    waiting: list[Block] = []
    covered = 0
    for block in blocks:
        if covered >= _MOST_STEPS:
            return
        if waiting and waiting[0][0] != block[0]:
            yield from waiting
            waiting = []
        waiting.append(block)
        covered += block[0]
        if len(waiting) > _BLOCKS_OF_A_SIZE:
            *newest, (steps, newer), (_, older) = waiting
            yield from newest
            waiting = [(2 * steps, newer + older)]
    yield from waiting
