"""A side as it stands on the command line: `NAME`, or `NAME:key=value,key=value`.

A value that begins with a quote, a brace or a bracket is JSON; any other ends at the next comma.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.config.sides import DeclaredSide, InferSide, TrainSide
from mismatch_probe.errors import UsageError

_JSON_BEGINS: Final = ("{", "[", '"')
_KINDS: Final[dict[str, type[DeclaredSide]]] = {"infer": InferSide, "train": TrainSide}


def parse_side(kind: str, text: str) -> dict[str, Any]:
    """The settings of a side of a kind (`infer`, `train`); what an engine's side does not know goes to its engine.

    Without a dtype, the name is one.

    Raises:
        UsageError: a part is not written as key=value, or given twice.
    """
    name, colon, rest = text.partition(":")
    side: dict[str, Any] = {"name": name, "dtype": name}
    args: dict[str, Any] = {}
    fields = _KINDS[kind].model_fields.keys() - {"logged"}
    for key, value in _settings(kind, text, rest) if colon else ():
        if key in args or (key in side and (key != "dtype" or side["dtype"] != name)) or key in ("name", "args"):
            raise UsageError(f"--{kind} {text!r} gives {key} twice, or by a name that is taken; give it once")
        if key in fields or kind != "infer":
            side[key] = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
        else:
            args[key] = value
    return side | ({"args": args} if args else {})


def write_side(side: Mapping[str, Any]) -> str:
    """What `parse_side` reads as this side."""
    settings = {
        key: value for key, value in side.items() if key not in ("name", "args", "logged") and value is not None
    }
    parts = [f"{key}={_written(value)}" for key, value in (settings | dict(side.get("args") or {})).items()]
    return ":".join([str(side["name"]), ",".join(parts)])


def _settings(kind: str, text: str, rest: str) -> Iterator[tuple[str, Any]]:
    """Names and values, as far as the text can be read."""
    while rest:
        key, equals, rest = rest.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name or "," in name:
            raise UsageError(f"--{kind} {text!r}: {key!r} is not written as key=value; write NAME:dtype=bf16,key=value")
        value: Any
        if rest.startswith(_JSON_BEGINS):
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"--{kind} {text!r}: the value of {name} is no JSON ({error})") from error
            rest = rest[end:]
            if rest and not rest.startswith(","):
                raise UsageError(f"--{kind} {text!r}: after the value of {name} stands {rest!r}; put a comma there")
            rest = rest[1:]
        else:
            value, _, rest = rest.partition(",")
        yield name, value


def _written(value: Any) -> str:
    if isinstance(value, str) and "," not in value and not value.startswith(_JSON_BEGINS):
        return value
    return json.dumps(value)
