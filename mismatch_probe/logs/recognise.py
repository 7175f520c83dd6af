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
        PluginError: the plug-in of this name cannot be used.
    """
    if name is not None:
        return FORMATS.require(name, f"--format {name}")
    files, formats = files_of(path), FORMATS.usable()
    counts = Counter(key for file in files for key, candidate in formats.items() if candidate.fits(look_at(file)))
    if not counts:
        kind = UsageError if files == [path] else NoLogError
        names = ", ".join(formats)
        raise kind(f"{_why_none(path, files)} (known formats: {names}); name one with --format, see docs/logs.md")
    best = min(_MOST_TELLING_FIRST.index(formats[fitting].holds) for fitting in counts)
    first, *others = [fitting for fitting in counts if formats[fitting].holds == _MOST_TELLING_FIRST[best]]
    if others:
        held = " and ".join(f"{formats[fitting].title} ({counts[fitting]} files)" for fitting in (first, *others))
        raise UsageError(f"{path} holds {held}; name one with --format {'|'.join((first, *others))}")
    return formats[first]


def _why_none(path: Path, files: list[Path]) -> str:
    if not files:
        return f"the folder {path} is empty, so it holds no log of a known format"
    if files != [path]:
        return f"none of the {len(files)} files below {path} is a log of a known format"
    why = look_at(path).why_other
    return f"the log {path} cannot be read: {why}" if why else f"{path} is not a log of a known format"
