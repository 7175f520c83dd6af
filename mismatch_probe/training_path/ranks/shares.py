"""Forward passes dealt out among ranks: each computes its own, and all have the results of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.training_path.ranks import group

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shares:
    """This rank's number among those that compute different passes; ranks that divide a product share one.

    The passes are planned from the sequences alone, so that the number of ranks changes no number.
    """

    number: int
    of: int

    @classmethod
    def of_settings(cls, settings: TrainingPathSettings) -> Self:
        """Ranks that divide a product stand side by side, as transformers lays them out."""
        return cls(group.rank() // settings.tensor_parallel, group.size() // settings.tensor_parallel)

    def worked_through(self, items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
        """`work` of every item, in order, on every rank.

        Every rank works equally often, since a forward pass gathers weights from all: those without an item left
        repeat the first one.

        Raises:
            RankLost: another rank is gone.
        """
        if not items:
            return []
        rounds = -(-len(items) // self.of)
        mine = [number * self.of + self.number for number in range(rounds)]
        with group.lost_ranks_named():
            own = {index: work(items[index if index < len(items) else 0]) for index in mine}
        everyone = {index: result for part in group.of_every_rank(own) for index, result in part.items()}
        return [everyone[index] for index in range(len(items))]
