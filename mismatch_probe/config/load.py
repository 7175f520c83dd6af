"""Settings from a TOML or YAML file, overridden by flags; an unknown key is an error with the nearest known one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from mismatch_probe.config.nested import merged
from mismatch_probe.config.texts import parse_toml, parse_yaml
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.reading import Unreadable, read_text

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
