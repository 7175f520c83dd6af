"""What two checkpoints of a run were found to differ in, file by file."""

from typing import Any

from mismatch_probe.records.documents import Entry


class TensorDifference(Entry):
    """relative: root mean square of the difference over that of the training side's tensor; None where the two have
    other shapes, or a format that is not computed with.
    """

    name: str
    relative: float | None = None


class WeightsDifference(Entry):
    """The tensors of the training side's checkpoint against those of the engine's.

    num_tensors: of one name in both. num_other: those of them with other numbers; largest: the few that differ most.
    num_rounded: those that are stored in another format and are equal up to its rounding; formats: in which, in the
    training side's checkpoint and in the engine's. train_alone, infer_alone: how many are in one alone; alone: a few of
    their names. is_sampled: the checkpoints are too large to be read whole, so a part of each tensor was.
    """

    num_tensors: int
    num_other: int = 0
    largest: list[TensorDifference] = []
    num_rounded: int = 0
    formats: tuple[str, str] | None = None
    train_alone: int = 0
    infer_alone: int = 0
    alone: list[str] = []
    is_sampled: bool = False

    @property
    def are_other(self) -> bool:
        """Whether any number is another, beyond how it is stored."""
        return bool(self.num_other or self.train_alone or self.infer_alone)


class CheckpointDifference(Entry):
    """train, infer: the two checkpoints, as the sides of a pair name them.

    config, generation: values of config.json and generation_config.json that differ, by their dotted names, the
    training side's first; None stands for one that is not there. tokenizer: what differs in its files, each in a few
    words. chat_template: where the templates part, empty where they do not.
    """

    train: str
    infer: str
    weights: WeightsDifference
    config: dict[str, tuple[Any, Any]] = {}
    generation: dict[str, tuple[Any, Any]] = {}
    tokenizer: list[str] = []
    chat_template: str = ""
