"""Which format a log is in, told from its content."""

from collections import Counter
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.formats import FORMATS
from mismatch_probe.logs.look import NoLogError, files_of, look_at

_MOST_TELLING_FIRST: Final = tuple(Holds)


def recognise(path: Path, name: str | None = None) -> Format:
    """The format of the file or the folder `path`; of several in a folder, the one that holds most. name: insists.

    Raises:
        NoLogError: none fits a file of the folder.
        UsageError: nothing is there, no format has this name, none fits the file, or two that hold as much do.
    """
    if name is not None:
        return _named(name)
    there = files_of(path)
    counts = Counter(known.name for file in there for known in FORMATS.values() if known.fits(look_at(file)))
    if not counts:
        why = _why_none(path, there)
        kind = UsageError if there == [path] else NoLogError
        raise kind(f"{why} (known formats: {_names()}); name one with --format, see docs/logs.md")
    best = min(_MOST_TELLING_FIRST.index(FORMATS[fitting].holds) for fitting in counts)
    first, *others = [fitting for fitting in counts if FORMATS[fitting].holds == _MOST_TELLING_FIRST[best]]
    if others:
        told = " and ".join(f"{FORMATS[fitting].title} ({counts[fitting]} files)" for fitting in (first, *others))
        raise UsageError(f"{path} holds {told}; name one with --format {'|'.join((first, *others))}")
    return FORMATS[first]


def _why_none(path: Path, there: list[Path]) -> str:
    if not there:
        return f"the folder {path} is empty, so it holds no log of a known format"
    if there != [path]:
        return f"none of the {len(there)} files below {path} is a log of a known format"
    why = look_at(path).why_other
    return f"the log {path} cannot be read: {why}" if why else f"{path} is not a log of a known format"


def _named(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(f"--format {name} is none of the known formats; give one of {_names()}")
    return FORMATS[name]


def _names() -> str:
    return ", ".join(FORMATS)
