"""Settings from TOML and YAML, read strictly and overridden by flags."""

import math
import tomllib
from collections.abc import Callable, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mismatch_probe.config.nested import merged
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.reading import Unreadable, each_once, read_text, require_text

_DEEPEST: Final = 100
_MOST_VALUES: Final = 100_000
"""YAML's references can stand for more than any memory holds."""


def parse_toml(text: str) -> Any:
    """What a TOML text means.

    Raises:
        Unreadable: it is malformed, names a key twice, or holds a value that no setting takes.
    """
    return _parsed(text, tomllib.loads)


def parse_yaml(text: str) -> Any:
    """What a YAML text means. Raises as `parse_toml`."""
    return _parsed(text, lambda written: yaml.load(written, _StrictLoader))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML's own loader keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        each_once((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return node


def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
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
    waiting, seen = [(content, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if depth > _DEEPEST:
            raise Unreadable("it nests deeper than can be read")
        if seen > _MOST_VALUES:
            raise Unreadable(f"it stands for more than {_MOST_VALUES:,} values")
        if isinstance(value, dict):
            waiting += [(below, depth + 1) for below in (*map(_key, value), *value.values())]
        elif isinstance(value, list):
            waiting += [(below, depth + 1) for below in value]
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
        raise UsageError(f"{flag} {path} cannot be read ({error}); mend it, or give another file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{flag} {path} holds no settings; its top level must be a table")
    return content


def given_settings(config: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds, where one is named, with the flags laid over it; raises as `read_settings_file`."""
    return merged({} if config is None else read_settings_file(config), flags)


def parse_settings(kind: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Validate settings; `where` says in the sentence where they stand.

    Raises:
        UsageError: a key is unknown, a value is out of range, or something required is missing.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_sentence(kind, problem) for problem in error.errors())
        raise UsageError(f"{where}: {problems}" if where else problems) from error


def _sentence(kind: type[BaseModel], problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        names = _known_keys(kind)
        return f"setting {place!r} is unknown{did_you_mean(place, names, did_you_mean(place.split('.')[-1], names))}"
    if problem["type"] == "missing":
        return f"setting {place!r} is missing"
    if problem["type"] == "model_type":
        return f"setting {place!r} is not usable: it must be a table"
    if problem["type"] in ("bool_type", "bool_parsing"):
        return f"setting {place!r} is not usable: give true or false, not {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"setting {place!r} is not usable: {message}" if place else message


def _known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in kind.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys.extend(_known_keys(info.annotation, f"{prefix}{name}."))
    return keys
