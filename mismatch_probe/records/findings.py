"""What `headroom`, `localize` and `explain` found: documents in a folder of their own, or filed in that of a run."""

from pathlib import Path
from typing import TypeVar

from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.documents import read_document, write_document
from mismatch_probe.records.explanation import Explanation
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.kinds import EXPLANATIONS, HEADROOM_FILE, LOCALIZATIONS
from mismatch_probe.records.localize import Localization
from mismatch_probe.records.regular_files import require_regular

Document = Headroom | Localization | Explanation
_Document = TypeVar("_Document", Headroom, Localization, Explanation)


class Findings:
    """`headroom.json`, `localize-TRAIN-INFER.json` for each pair of dtypes that was looked into, and `explain.json` or
    `explain-step-N.json` of a log.
    """

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

    def explanations(self) -> list[Explanation]:
        """Of a log, and of each of its steps that was explained; raises as `headroom`."""
        return [_read(path, Explanation) for path in sorted(self.folder.glob(EXPLANATIONS))]

    def documents(self) -> list[Document]:
        """All there is; raises as `headroom`."""
        headroom = self.headroom()
        return [*([] if headroom is None else [headroom]), *self.localizations(), *self.explanations()]

    def write(self, document: Document) -> None:
        """File a document where there is none of its kind.

        Raises:
            RunDirectoryError: there is one.
            StorageError: the disk refused.
        """
        path = self.folder / file_name(document)
        require_absent(path)
        write_document(path, document)

    def _localizations(self) -> list[Path]:
        return sorted(self.folder.glob(LOCALIZATIONS))


def file_name(document: Document) -> str:
    """Of the file that holds a document."""
    if isinstance(document, Headroom):
        return HEADROOM_FILE
    if isinstance(document, Explanation):
        return explain_file(document.step)
    return localize_file(*document.settings.names)


def explain_file(step: int | None) -> str:
    return "explain.json" if step is None else f"explain-step-{step}.json"


def localize_file(train: str, infer: str) -> str:
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
    )
