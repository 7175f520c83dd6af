"""What says the same in other words: a folder as `x`, `./x`, `x/`, its whole path, a link to it; a number of ranks."""

from typing import Any

from mismatch_probe.config.comparison import CompareSettings, Declared
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.sides import DeclaredSide, TrainSide
from mismatch_probe.errors import UsageError
from mismatch_probe.reading import Unreadable, expanded


def same_folder(first: str | None, second: str | None) -> bool:
    """Whether two texts lead to one folder here; a text is always the same as itself."""
    if first == second:
        return True
    if first is None or second is None:
        return False
    try:
        return expanded(first).is_dir() and expanded(first).samefile(expanded(second))
    except (OSError, Unreadable):
        return False


def with_one_spelling(settings: CompareSettings) -> CompareSettings:
    """The settings with each folder of weights as it is spelled first, by which sides are known to hold the same."""
    spelled = [settings.model.path]

    def spell(place: str | None) -> str | None:
        if place is None:
            return None
        known = next((spelling for spelling in spelled if same_folder(spelling, place)), None)
        if known is None:
            spelled.append(place)
        return known or place

    def of_side(side: Declared) -> Declared:
        return side.model_copy(update={"checkpoint": spell(side.checkpoint), "adapter": spell(side.adapter)})

    training = settings.training.model_copy(update={"adapter": spell(settings.training.adapter)})
    engine = settings.engine.model_copy(update={"adapter": spell(settings.engine.adapter)})
    sides = {kind: tuple(map(of_side, getattr(settings, kind))) for kind in ("train", "infer")}
    return settings.model_copy(update={"training": training, "engine": engine, **sides})


def same_side(first: DeclaredSide, second: DeclaredSide) -> bool:
    """Whether two declarations say the same, however they spell its folders and however many ranks hold its model."""
    if not all(same_folder(getattr(first, name), getattr(second, name)) for name in ("checkpoint", "adapter")):
        return False
    alike: dict[str, Any] = {"checkpoint": second.checkpoint, "adapter": second.adapter}
    if isinstance(second, TrainSide):
        alike["ranks"] = second.ranks
    return first.model_copy(update=alike) == second


def held_by_ranks(settings: CompareSettings, ranks: int) -> CompareSettings:
    """The settings with every model of the training path held by the ranks that torchrun started.

    Raises:
        UsageError: a side's tensor_parallel does not divide them.
    """
    values = settings.model_dump(mode="json")
    values["training"]["ranks"] = ranks
    for side in values["train"]:
        side["ranks"] = None
    held = parse_settings(CompareSettings, values)
    for side in held.train_sides:
        if side.num_ranks != ranks:
            assert side.training is not None
            degree = side.training.tensor_parallel
            raise UsageError(
                f"the side {side.name} divides products among {degree} ranks (tensor_parallel), and torchrun's number "
                f"of ranks, {ranks}, is no multiple of that; start a multiple of {degree}, or run the command without "
                "torchrun, which gives each side ranks of its own"
            )
    return held


def with_ranks_of(now: CompareSettings, settings: CompareSettings) -> CompareSettings:
    """The settings with each model held by as many ranks as `now` says, where that knows the side."""
    ranks = {side.name: side.ranks for side in now.train}
    train = tuple(side.model_copy(update={"ranks": ranks.get(side.name, side.ranks)}) for side in settings.train)
    training = settings.training.model_copy(update={"ranks": now.training.ranks})
    return settings.model_copy(update={"train": train, "training": training})
