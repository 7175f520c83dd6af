"""A side as it stands on the command line: `NAME`, or `NAME:key=value,key=value`.

A value that begins with a quote, a brace or a bracket is JSON; any other ends at the next comma.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.sides import DeclaredSide, InferSide, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError, did_you_mean

_JSON_BEGINS: Final = ("{", "[", '"')
_SECOND_SETTING: Final = re.compile(r"\s\w+=")
_KINDS: Final[dict[str, type[DeclaredSide]]] = {"infer": InferSide, "train": TrainSide}
_OTHER: Final = {"infer": "train", "train": "infer"}
_NUMBERS: Final = ("ranks", "tensor_parallel")
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
    return [_checked(kind, replica, text) for replica in replicas]


def parse_side(kind: str, text: str) -> dict[str, Any]:
    """The settings of a side of a kind (`infer`, `train`); what an engine's side does not know goes to its engine.

    Without a dtype, the name is one; a server need not say its dtype.

    Raises:
        UsageError: a part is not written as key=value, given twice, or no setting of this kind of side.
    """
    return _checked(kind, _read(kind, text), text)


def _checked(kind: str, side: dict[str, Any], text: str) -> dict[str, Any]:
    parse_settings(_KINDS[kind], side, _said(kind, text))
    return side


def _said(kind: str, text: str) -> str:
    """The flag as it was given; of one with an address, which may hold a secret, its name alone."""
    return f"--{kind} {text!r}" if "://" not in text else f"--{kind} {text.partition(':')[0]}"


def _read(kind: str, text: str) -> dict[str, Any]:
    name, colon, rest = text.partition(":")
    said = _said(kind, text)
    if not name:
        raise UsageError(f"{said} begins without a name; write NAME:dtype=bf16,key=value")
    own, others = (_KINDS[side_kind].model_fields.keys() - {"logged"} for side_kind in (kind, _OTHER[kind]))
    side: dict[str, Any] = {"name": name}
    args: dict[str, Any] = {}
    for key, value in _settings(said, rest) if colon else ():
        if key in _NO_SETTINGS:
            raise UsageError(f"{said}: {key} is no setting; {_NO_SETTINGS[key]}")
        if key in args or key in side:
            raise UsageError(f"{said} gives {key} twice; give it once")
        if key in others - own:
            raise UsageError(f"{said}: {key} is a setting of the other side; give it to --{_OTHER[kind]}")
        if key in own:
            side[key] = _typed(key, value)
        elif kind == "infer":
            args[key] = value
        else:
            near = did_you_mean(key, own) or "; an engine's arguments belong to --infer"
            raise UsageError(f"{said}: a training side has no setting {key}{near}")
    if "dtype" not in side and "url" not in side:
        side = {"name": name, "dtype": _dtype_in(name, said, rest), **side}
    return side | ({"args": args} if args else {})


def _typed(key: str, value: Any) -> Any:
    """What stands for true, false or a number, where the setting is one; any other text stays text."""
    if not isinstance(value, str):
        return value
    if key in _NUMBERS and value.isdecimal():
        return int(value)
    return {"true": True, "false": False}.get(value, value)


def _dtype_in(name: str, said: str, rest: str) -> str:
    """The name itself, where it is a dtype's."""
    try:
        Dtype.parse(name)
    except UsageError as error:
        behind = f",{rest}" if rest else ""
        raise UsageError(f"{said} says no dtype, and its name is none; write {name}:dtype=bf16{behind}") from error
    return name


def write_side(side: Mapping[str, Any]) -> str:
    """What `parse_side` reads as this side."""
    settings = {
        key: value for key, value in side.items() if key not in ("name", "args", "logged") and value is not None
    }
    parts = [f"{key}={_written(value)}" for key, value in (settings | dict(side.get("args") or {})).items()]
    return ":".join([str(side["name"]), ",".join(parts)])


def _settings(said: str, rest: str) -> Iterator[tuple[str, Any]]:
    """Names and values, as far as the text can be read."""
    while rest:
        key, equals, rest = rest.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name or "," in name:
            raise UsageError(
                f"{said}: {key!r} is not written as key=value; write NAME:dtype=bf16,key=value, and a value with "
                "commas as JSON: key=[1, 2]"
            )
        value: Any
        if rest.startswith(_JSON_BEGINS):
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{said}: the value of {name} is no JSON ({error})") from error
            rest = rest[end:]
            if rest and not rest.startswith(","):
                raise UsageError(f"{said}: after the value of {name} stands {rest!r}; put a comma there")
            rest = rest[1:]
        else:
            value, _, rest = rest.partition(",")
            value = value.strip()
            if _SECOND_SETTING.search(value):
                raise UsageError(f"{said}: the value of {name} is {value!r}; put a comma before the next setting")
        yield name, value


def _written(value: Any) -> str:
    if isinstance(value, str) and "," not in value and not value.startswith(_JSON_BEGINS):
        return value
    return json.dumps(value)
