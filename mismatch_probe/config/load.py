"""Settings from TOML, YAML and flags, read strictly; a side as it stands on the command line.

A value that begins with a quote, a brace or a bracket is JSON; any other ends at the next comma.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from mismatch_probe.config.sides import DeclaredSide, InferSide, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.reading import (
    Unreadable,
    merge_tables,
    read_text,
    require_text,
    without_duplicate_keys,
)

_DEEPEST: Final = 100
_MOST_VALUES: Final = 100_000
"""YAML's references can stand for more than any memory holds."""


def parse_toml(text: str) -> Any:
    """What a TOML text means.

    Raises:
        Unreadable: it is malformed, names a key twice, or holds a value that no setting takes.
    """
    return _parse(text, tomllib.loads)


def parse_yaml(text: str) -> Any:
    """What a YAML text means. Raises as `parse_toml`."""
    return _parse(text, lambda content: yaml.load(content, _StrictLoader))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML's own loader keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        without_duplicate_keys((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return node


def _parse(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        content = parse(text)
    except Unreadable:
        raise
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise Unreadable(f"malformed: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise Unreadable("it nests deeper than can be read") from error
    except (ValueError, AttributeError) as error:  # what the readers meet in a number or a date
        raise Unreadable(f"it holds a value that cannot be read ({str(error).partition(':')[0]})") from error
    _require_plain(content)
    return content


def _require_plain(content: Any) -> None:
    stack, num_values = [(content, 0)], 0
    while stack:
        value, depth = stack.pop()
        num_values += 1
        if depth > _DEEPEST:
            raise Unreadable("it nests deeper than can be read")
        if num_values > _MOST_VALUES:
            raise Unreadable(f"it stands for more than {_MOST_VALUES:,} values")
        if isinstance(value, dict):
            stack += [(entry, depth + 1) for entry in (*map(_key, value), *value.values())]
        elif isinstance(value, list):
            stack += [(entry, depth + 1) for entry in value]
        else:
            _require_plain_value(value)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise Unreadable(f"its key {key!r} is no text; put it in quotes")
    return key


def _require_plain_value(value: Any) -> None:
    if isinstance(value, str):
        require_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise Unreadable(f"it holds {value}, which is no number that a setting takes")
    elif isinstance(value, date | time):
        raise Unreadable(f"it holds the date or time {value}; put it in quotes")
    elif value is not None and not isinstance(value, int | float):
        raise Unreadable(f"it holds a {type(value).__name__}, which no setting takes")


Model = TypeVar("Model", bound=BaseModel)

_PARSERS: Final[dict[str, Callable[[str], Any]]] = {".toml": parse_toml, ".yaml": parse_yaml, ".yml": parse_yaml}


def read_settings_file(path: Path, *, flag: str = "--config") -> dict[str, Any]:
    """The mapping a TOML or YAML file holds; `flag` is what named it.

    Raises:
        UsageError: the file is missing, of another kind, or malformed.
    """
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise UsageError(f"{flag} {path} is neither .toml nor .yaml; save it as one of the two")
    try:
        content = parse(read_text(path))
    except FileNotFoundError as error:
        raise UsageError(f"{flag} {path} does not exist; `mismatch-probe init` lists files to begin with") from error
    except Unreadable as error:
        raise UsageError(f"{flag} {path} cannot be read ({error}); fix it, or give another file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{flag} {path} holds no settings; its top level must be a table")
    return content


def given_settings(config: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds, where one is named, with the flags laid over it; raises as `read_settings_file`."""
    return merge_tables({} if config is None else read_settings_file(config), flags)


def parse_settings(kind: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Validate settings; `where` says in the sentence where they stand.

    Raises:
        UsageError: a key is unknown, a value is out of range, or something required is missing.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_sentences(kind, error.errors()))
        raise UsageError(f"{where}: {problems}" if where else problems) from error


_NOT_USABLE: Final = " is not usable: "


def _sentences(kind: type[BaseModel], problems: Sequence[Any]) -> Iterator[str]:
    """One for each reason: a flag that gives two settings is refused once."""
    settings_of: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        setting, separator, reason = _sentence(kind, problem).partition(_NOT_USABLE)
        settings_of.setdefault((separator, reason or setting), []).append(setting)
    for (separator, reason), settings in settings_of.items():
        names = [setting.removeprefix("setting ") for setting in settings]
        several = f"settings {' and '.join(names)} are not usable: {reason}"
        yield several if len(names) > 1 else f"{settings[0]}{separator}{reason}" if separator else reason


def _sentence(kind: type[BaseModel], problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        names = _known_keys(kind)
        return f"setting {place!r} is unknown{did_you_mean(place, names, did_you_mean(place.split('.')[-1], names))}"
    if problem["type"] == "missing":
        return f"setting {place!r} is missing"
    if problem["type"] == "model_type":
        return f"setting {place!r}{_NOT_USABLE}it must be a table"
    if problem["type"] in ("bool_type", "bool_parsing"):
        return f"setting {place!r}{_NOT_USABLE}give true or false, not {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"setting {place!r}{_NOT_USABLE}{message}" if place else message


def _known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in kind.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys.extend(_known_keys(info.annotation, f"{prefix}{name}."))
    return keys


_JSON_BEGINS: Final = ("{", "[", '"')
_SECOND_SETTING: Final = re.compile(r"\s\w+=")
_KINDS: Final[dict[str, type[DeclaredSide]]] = {"infer": InferSide, "train": TrainSide}
_OTHER: Final = {"infer": "train", "train": "infer"}
_NO_SETTINGS: Final = {
    "name": "the side's name stands before the colon",
    "args": "each of the engine's arguments stands by its own name",
}


def parse_sides(kind: str, text: str) -> list[dict[str, Any]]:
    """A side as `parse_side` reads it; of several servers, `url=["http://...", ...]`, one for each: NAME-1, NAME-2, ...

    Replicas behind one address would be a mixture: each answers for itself with an address of its own.

    Raises:
        UsageError: as `parse_side`.
    """
    side = _read(kind, text)
    urls = side.get("url")
    replicas = [side]
    if isinstance(urls, list):
        replicas = [side | {"name": f"{side['name']}-{number}", "url": url} for number, url in enumerate(urls, 1)]
    return [_check_side(kind, replica, text) for replica in replicas]


def parse_side(kind: str, text: str) -> dict[str, Any]:
    """The settings of a side of a kind (`infer`, `train`); what an engine's side does not know goes to its engine.

    Without a dtype, the name is one; a server need not say its dtype.

    Raises:
        UsageError: a part is not written as key=value, given twice, or no setting of this kind of side.
    """
    return _check_side(kind, _read(kind, text), text)


def _check_side(kind: str, side: dict[str, Any], text: str) -> dict[str, Any]:
    parse_settings(_KINDS[kind], side, _flag(kind, text))
    return side


def _flag(kind: str, text: str) -> str:
    """The flag as it was given; of one with an address, which may hold a secret, its name alone."""
    return f"--{kind} {text!r}" if "://" not in text else f"--{kind} {text.partition(':')[0]}"


def _read(kind: str, text: str) -> dict[str, Any]:
    name, colon, rest = text.partition(":")
    flag = _flag(kind, text)
    if not name:
        raise UsageError(f"{flag} begins without a name; write NAME:dtype=bf16,key=value")
    own, others = (_KINDS[side_kind].model_fields.keys() - {"logged"} for side_kind in (kind, _OTHER[kind]))
    side: dict[str, Any] = {"name": name}
    args: dict[str, Any] = {}
    for key, value in _settings_of_text(flag, rest) if colon else ():
        if key in _NO_SETTINGS:
            raise UsageError(f"{flag}: {key} is no setting; {_NO_SETTINGS[key]}")
        if key in args or key in side:
            raise UsageError(f"{flag} gives {key} twice; give it once")
        if key in others - own:
            raise UsageError(f"{flag}: {key} is a setting of the other side; give it to --{_OTHER[kind]}")
        if key in own:
            side[key] = _value_of_text(key, value)
        elif kind == "infer":
            args[key] = value
        else:
            hint = did_you_mean(key, own) or "; an engine's arguments belong to --infer"
            raise UsageError(f"{flag}: a training side has no setting {key}{hint}")
    if "dtype" not in side and "url" not in side:
        side = {"name": name, "dtype": _dtype_in(name, flag, rest), **side}
    return side | ({"args": args} if args else {})


def _value_of_text(key: str, value: Any) -> Any:
    """What stands for true, false or a number, where the setting is one; any other text stays text."""
    if not isinstance(value, str):
        return value
    infos = [kind.model_fields[key] for kind in _KINDS.values() if key in kind.model_fields]
    if value.isdecimal() and any(_has_whole_numbers(info.annotation) for info in infos):
        return int(value)
    return {"true": True, "false": False}.get(value, value)


def _has_whole_numbers(annotation: Any) -> bool:
    return annotation is int or any(map(_has_whole_numbers, get_args(annotation)))


def _dtype_in(name: str, flag: str, rest: str) -> str:
    """The name itself, where it is a dtype's."""
    try:
        Dtype.parse(name)
    except UsageError as error:
        others = f",{rest}" if rest else ""
        raise UsageError(f"{flag} says no dtype, and its name is none; write {name}:dtype=bf16{others}") from error
    return name


def write_side(side: Mapping[str, Any]) -> str:
    """What `parse_side` reads as this side."""
    settings = {
        key: value for key, value in side.items() if key not in ("name", "args", "logged") and value is not None
    }
    parts = [f"{key}={_write_value(value)}" for key, value in (settings | dict(side.get("args") or {})).items()]
    return ":".join([str(side["name"]), ",".join(parts)])


def _settings_of_text(flag: str, rest: str) -> Iterator[tuple[str, Any]]:
    """Names and values, as far as the text can be read."""
    while rest:
        key, equals, rest = rest.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name or "," in name:
            raise UsageError(
                f"{flag}: {key!r} is not written as key=value; write NAME:dtype=bf16,key=value, and a value with "
                "commas as JSON: key=[1, 2]"
            )
        value: Any
        if rest.startswith(_JSON_BEGINS):
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{flag}: the value of {name} is no JSON ({error})") from error
            rest = rest[end:]
            if rest and not rest.startswith(","):
                raise UsageError(f"{flag}: after the value of {name} stands {rest!r}; put a comma there")
            rest = rest[1:]
        else:
            value, _, rest = rest.partition(",")
            value = value.strip()
            if _SECOND_SETTING.search(value):
                raise UsageError(f"{flag}: the value of {name} is {value!r}; put a comma before the next setting")
        yield name, value


def _write_value(value: Any) -> str:
    if isinstance(value, str) and "," not in value and not value.startswith(_JSON_BEGINS):
        return value
    return json.dumps(value)
