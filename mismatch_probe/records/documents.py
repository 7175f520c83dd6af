"""The JSON documents of a run directory, read in one way: strictly, and refused in one sentence."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mismatch_probe.errors import BrokenRecord, RunDirectoryError
from mismatch_probe.reading import Unreadable, as_object, parse_json, read_text
from mismatch_probe.records.atomic import write_text

Model = TypeVar("Model", bound=BaseModel)


class Entry(BaseModel):
    """A part of a document that is still being written; no unknown keys."""

    model_config = ConfigDict(extra="forbid")


def write_document(path: Path, document: BaseModel) -> None:
    """
    Raises:
        StorageError: the disk refused.
    """
    write_text(path, document.model_dump_json(indent=2) + "\n")


def read_document(path: Path, kind: type[Model], *, missing: str, mend: str) -> Model:
    """A document of `kind`, whose first field is its version, by default the one that is read here.

    `missing` is why it may not be there, `mend` what to do about one that cannot be read.

    Raises:
        RunDirectoryError: it is not there.
        BrokenRecord: it is damaged, no document of this kind, or of another version.
    """
    try:
        text = read_text(path)
        _require_version(as_object(parse_json(text)), kind)
        return kind.model_validate_json(text)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} does not exist: {missing}") from error
    except ValidationError as error:
        raise BrokenRecord(f"{path} cannot be read ({first_problem(error)}); {mend}") from error
    except Unreadable as error:
        raise BrokenRecord(f"{path} cannot be read ({error}); {mend}") from error


def _require_version(content: dict[str, Any], kind: type[BaseModel]) -> None:
    name, field = next(iter(kind.model_fields.items()))
    version = content.get(name)
    if type(version) is not int or version != field.default:
        version_read = f"{name.replace('_', ' ')} {json.dumps(version)[:20]}"
        raise Unreadable(f"it has {version_read}, this version reads {field.default}")


def first_problem(error: ValidationError) -> str:
    """Where the first mistake is, and which."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
