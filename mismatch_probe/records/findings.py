"""What `headroom` and `localize` found: documents in a folder of their own, or filed in the directory of a run."""

import json
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, RunDirectoryError
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.headroom import HEADROOM_VERSION, Headroom
from mismatch_probe.records.localize import LOCALIZE_VERSION, Localization

HEADROOM_FILE: Final = "headroom.json"

_Document = TypeVar("_Document", Headroom, Localization)
_VERSIONS = {Headroom: HEADROOM_VERSION, Localization: LOCALIZE_VERSION}


class Findings:
    """`headroom.json`, and `localize-TRAIN-INFER.json` for each pair of dtypes that was looked into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exist(self) -> bool:
        return (self.folder / HEADROOM_FILE).exists() or bool(self._localizations())

    def headroom(self) -> Headroom | None:
        """None where there is none.

        Raises:
            BrokenRecord: it is damaged, or of another version.
        """
        path = self.folder / HEADROOM_FILE
        return _read(path, Headroom) if path.exists() else None

    def localizations(self) -> list[Localization]:
        """Of every pair of dtypes that was looked into; raises as `headroom`."""
        return [_read(path, Localization) for path in self._localizations()]

    def documents(self) -> list[Headroom | Localization]:
        """All there is; raises as `headroom`."""
        headroom = self.headroom()
        return [*([] if headroom is None else [headroom]), *self.localizations()]

    def write(self, document: Headroom | Localization) -> None:
        """File a document where there is none of its kind.

        Raises:
            RunDirectoryError: there is one.
            StorageError: the disk refused.
        """
        path = self.folder / file_name(document)
        require_absent(path)
        write_text(path, document.model_dump_json(indent=2) + "\n")

    def _localizations(self) -> list[Path]:
        return sorted(self.folder.glob("localize-*-*.json"))


def file_name(document: Headroom | Localization) -> str:
    """Of the file that holds a document."""
    if isinstance(document, Headroom):
        return HEADROOM_FILE
    return localize_file(document.settings.train_dtype, document.settings.infer_dtype)


def localize_file(train: Dtype, infer: Dtype) -> str:
    return f"localize-{train}-{infer}.json"


def require_absent(path: Path) -> None:
    """
    Raises:
        RunDirectoryError: the document is there; none is silently written over.
    """
    if path.exists():
        raise RunDirectoryError(f"{path} is there already: remove it to look again, or give --out another folder")


def _read(path: Path, kind: type[_Document]) -> _Document:
    again = "remove it and make it again"
    try:
        text = path.read_text(encoding="utf-8")
        version = json.loads(text).get("schema_version")
        if version != _VERSIONS[kind]:
            raise BrokenRecord(f"{path} has schema version {version}, this version reads {_VERSIONS[kind]}; {again}")
        return kind.model_validate_json(text)
    except (OSError, UnicodeDecodeError, ValidationError, json.JSONDecodeError, AttributeError) as error:
        raise BrokenRecord(f"{path} cannot be read ({str(error).splitlines()[0]}); {again}") from error
