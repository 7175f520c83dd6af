"""A run is resumed: which settings are equal though they are spelled otherwise, and which are never taken from its
directory because they run code.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mismatch_probe.config.comparison import CompareSettings, Declared
from mismatch_probe.config.load import parse_settings, write_side
from mismatch_probe.config.sides import DeclaredSide, TrainSide
from mismatch_probe.errors import UsageError
from mismatch_probe.inert import words_line
from mismatch_probe.reading import Unreadable, expand_user, merge_tables


def same_folder(first: str | None, second: str | None) -> bool:
    """Whether two texts lead to one folder here; a text is always the same as itself."""
    if first == second:
        return True
    if first is None or second is None:
        return False
    try:
        return expand_user(first).is_dir() and expand_user(first).samefile(expand_user(second))
    except (OSError, Unreadable):
        return False


def with_one_spelling(settings: CompareSettings) -> CompareSettings:
    """The settings with each folder of weights as it is spelled first, by which sides are known to hold the same."""
    spellings = [settings.model.path]

    def spell(place: str | None) -> str | None:
        if place is None:
            return None
        first = next((spelling for spelling in spellings if same_folder(spelling, place)), None)
        if first is None:
            spellings.append(place)
        return first or place

    def of_side(side: Declared) -> Declared:
        return side.model_copy(update={"checkpoint": spell(side.checkpoint), "adapter": spell(side.adapter)})

    training = settings.training.model_copy(update={"adapter": spell(settings.training.adapter)})
    engine = settings.engine.model_copy(update={"adapter": spell(settings.engine.adapter)})
    sides = {kind: tuple(map(of_side, getattr(settings, kind))) for kind in ("train", "infer")}
    return settings.model_copy(update={"training": training, "engine": engine, **sides})


def same_side(first: DeclaredSide, second: DeclaredSide) -> bool:
    """Whether two declarations of a side are equal but for the spelling of folders and the number of ranks."""
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
    result = parse_settings(CompareSettings, values)
    for side in result.train_sides:
        if side.num_ranks != ranks:
            assert side.training is not None
            degree = side.training.tensor_parallel
            raise UsageError(
                f"the side {side.name} divides products among {degree} ranks (tensor_parallel), and torchrun's number "
                f"of ranks, {ranks}, is no multiple of that; start a multiple of {degree}, or run the command without "
                "torchrun, which gives each side ranks of its own"
            )
    return result


def with_ranks_of(new: CompareSettings, settings: CompareSettings) -> CompareSettings:
    """The settings with each model held by as many ranks as `new` says, where that knows the side."""
    ranks = {side.name: side.ranks for side in new.train}
    train = tuple(side.model_copy(update={"ranks": ranks.get(side.name, side.ranks)}) for side in settings.train)
    training = settings.training.model_copy(update={"ranks": new.training.ranks})
    return settings.model_copy(update={"train": train, "training": training})


_PLAIN_WORD: Final = re.compile(r"[\w+-]*")
"""A number or a name of the engine's own: code and files are named with dots, colons, slashes or in tables."""
_SIDES: Final = ("pairs", "infer", "train")
_REWARDS: Final = (("task", "reward"), ("evaluation", "reward"))

SettingPath = tuple[str, ...]


def resumed_settings(run: Path, record: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """The settings recorded in `run`, with those given now laid over them.

    Raises:
        UsageError: what was recorded runs code and is not given now.
    """
    missing = [word for place, words in _code(record).items() if _at(current, place) is None for word in words]
    if missing:
        raise UsageError(
            f"{run} was made with {words_line(*missing)}: what runs code is not taken from a run directory, nor is "
            "a server's address; give it again if you trust it"
        )
    return merge_tables(record, current)


def resumed_comparison(
    run: Path,
    record: CompareSettings,
    current: Mapping[str, Any],
    as_recorded: Callable[[CompareSettings], CompareSettings],
) -> CompareSettings:
    """A comparison's settings, with those given now laid over them; pairs and sides given now are added.

    as_recorded: brings settings to how a run records them, where a flag's text and a file's number are the same.

    Raises:
        UsageError: what was recorded runs code and is not given now, a side was recorded otherwise, or a setting
            cannot be used.
    """
    old = record.model_dump(mode="json")
    if set(_SIDES) & {name for name in current if current[name]} == {"infer"}:
        current = {**current, "infer": _with_repeated_sides(old["infer"], current["infer"])}
    elif any(name in current for name in _SIDES):
        old = {name: value for name, value in old.items() if name not in _SIDES}
    new = parse_settings(CompareSettings, merge_tables(old, current))
    _require_same_sides(run, as_recorded(record), as_recorded(new))
    resumed_settings(run, record.model_dump(mode="json"), current)
    settings = with_ranks_of(new, record.with_more(new.pairs, new.infer, new.train))
    return new.model_copy(update={"pairs": settings.pairs, "infer": settings.infer, "train": settings.train})


def _with_repeated_sides(record: Sequence[Any], current: Sequence[Any]) -> list[Any]:
    """Recorded sides with those in their places that are given again under the same names, and any others."""
    names = [side.get("name") for side in record]
    repeated_sides = {side.get("name"): side for side in current if isinstance(side, Mapping)}
    return [repeated_sides.get(side.get("name"), side) for side in record] + [
        side for side in current if not isinstance(side, Mapping) or side.get("name") not in names
    ]


def _require_same_sides(run: Path, record: CompareSettings, new: CompareSettings) -> None:
    for kind, old_sides, new_sides in (("infer", record.infer, new.infer), ("train", record.train, new.train)):
        recorded_sides: dict[str, DeclaredSide] = {side.name: side for side in old_sides}
        for side in new_sides:
            if side.name in recorded_sides and not same_side(recorded_sides[side.name], side):
                raise UsageError(
                    f"{run} has another side of the name {side.name}; give --{kind} another name, or leave it out"
                )


def code_flags(settings: Mapping[str, Any]) -> list[str]:
    """What of the settings runs code or is sent something, as it is given on the command line."""
    return [word for words in _code(settings).values() for word in words]


def _code(settings: Mapping[str, Any]) -> dict[SettingPath, list[str]]:
    """Where settings run code of a checkpoint, name code, or name a server; and the words that give them."""
    flags: dict[SettingPath, list[str]] = {}
    trust_setting = ("model", "trust_remote_code")
    if _at(settings, trust_setting):
        flags[trust_setting] = ["--trust-remote-code"]
    for place in _REWARDS:
        reward = _at(settings, place)
        if isinstance(reward, str) and ":" in reward:
            flags[place] = ["--reward", reward]
    for name, value in (_at(settings, ("engine", "args")) or {}).items():
        if not _is_harmless(value):
            flags["engine", "args", name] = [f"--vllm.{name}", value if isinstance(value, str) else json.dumps(value)]
    for kind in ("infer", "train"):
        for side in settings.get(kind) or ():
            runs_code = not all(map(_is_harmless, (side.get("args") or {}).values()))
            if runs_code or side.get("url") or (side.get("checkpoint") and trust_setting in flags):
                flags[kind, side["name"]] = [f"--{kind}", write_side(side)]
    return flags


def _is_harmless(value: Any) -> bool:
    if not isinstance(value, str):
        return value is None or isinstance(value, bool | int | float)
    try:
        float(value)
    except ValueError:
        return _PLAIN_WORD.fullmatch(value) is not None
    return True


def _at(settings: Mapping[str, Any], place: SettingPath) -> Any:
    """What stands at a place; of a list, what has that name."""
    value: Any = settings
    for name in place:
        if isinstance(value, list | tuple):
            value = next((table for table in value if isinstance(table, Mapping) and table.get("name") == name), None)
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value
