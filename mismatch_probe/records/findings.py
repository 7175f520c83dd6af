"""What `headroom` and `localize` found: documents in a folder of their own, or filed in the directory of a run."""

from pathlib import Path
from typing import TypeVar

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.documents import read_document
from mismatch_probe.records.headroom import HEADROOM_VERSION, Headroom
from mismatch_probe.records.kinds import HEADROOM_FILE, LOCALIZATIONS
from mismatch_probe.records.localize import LOCALIZE_VERSION, Localization
from mismatch_probe.records.regular_files import require_regular

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
        return sorted(self.folder.glob(LOCALIZATIONS))


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
    require_regular(path)
    return read_document(
        path,
        kind,
        missing="nothing was found yet",
        mend="remove it and make it again",
        version=("schema_version", _VERSIONS[kind]),
    )
