"""TOML and YAML read strictly: only values that JSON has too, so that a run can record them, and each key once."""

import math
import tomllib
from collections.abc import Callable
from datetime import date, time
from typing import Any, Final

import yaml

from mismatch_probe.reading import Unreadable, each_once, require_text

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
