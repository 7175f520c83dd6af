"""A side as it stands on the command line: `NAME`, or `NAME:key=value,key=value`."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.config.sides import DeclaredSide, InferSide, TrainSide
from mismatch_probe.errors import UsageError
from mismatch_probe.reading import Unreadable, parse_json

_COMMA: Final = re.compile(r""",(?=(?:[^"]*"[^"]*")*[^"]*$)(?![^{]*\})(?![^\[]*\])""")
"""One that stands in no quotes, braces or brackets."""

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
    fields = _KINDS[kind].model_fields
    for part in _COMMA.split(rest) if colon else ():
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not (equals and key):
            raise UsageError(
                f"--{kind} {text!r}: {part!r} is not written as key=value; write NAME:dtype=bf16,key=value"
            )
        if key in args or (key in side and (key != "dtype" or side["dtype"] != name)) or key in ("name", "args"):
            raise UsageError(f"--{kind} {text!r} gives {key} twice, or by a name that is taken; give it once")
        if key in fields or kind != "infer":
            side[key] = {"true": True, "false": False}.get(value, value)
        else:
            args[key] = value
    return side | ({"args": args} if args else {})


def write_side(side: Mapping[str, Any]) -> str:
    """What `parse_side` reads as this side."""
    settings = {key: value for key, value in side.items() if key not in ("name", "args") and value is not None}
    parts = [f"{key}={_written(value)}" for key, value in (settings | dict(side.get("args") or {})).items()]
    return ":".join([str(side["name"]), ",".join(parts)])


def _written(value: Any) -> str:
    if isinstance(value, str):
        try:
            parse_json(value)
        except Unreadable:
            return value
    return json.dumps(value)
