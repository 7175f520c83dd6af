"""Every format that is read, one file a system, and which one a log is in by its content."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.inert import command_line
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.formats.conversations import HARBOR, NEMO_GYM, RLLM
from mismatch_probe.logs.formats.nemo_rl import NEMO_RL
from mismatch_probe.logs.formats.open_instruct import OPEN_INSTRUCT
from mismatch_probe.logs.formats.plain import NEEDED, PLAIN
from mismatch_probe.logs.formats.prime_rl import PRIME_RL, PRIME_RL_TRACES
from mismatch_probe.logs.formats.responses import SGLANG_RESPONSES, VLLM_RESPONSES
from mismatch_probe.logs.formats.skyrl import SKYRL
from mismatch_probe.logs.formats.slime import MILES, MILES_TRAIN, SLIME, SLIME_ROLLOUT
from mismatch_probe.logs.formats.texts import AREAL, RLLM_TEXT, ROLL, TRL, VERL_TEXT
from mismatch_probe.logs.formats.tinker import TINKER
from mismatch_probe.logs.formats.verl import VERL, VERL_PROTOCOL
from mismatch_probe.logs.look import FileKind, FileLook, NoLogError, files_of, is_run, look_at
from mismatch_probe.plugins import ContractError, Registry
from mismatch_probe.reading import is_folder

_BUILT_IN: Final = (
    PLAIN,
    NEMO_RL,
    PRIME_RL,
    PRIME_RL_TRACES,
    SLIME,
    SLIME_ROLLOUT,
    SKYRL,
    MILES,
    MILES_TRAIN,
    OPEN_INSTRUCT,
    TINKER,
    VERL,
    VERL_PROTOCOL,
    VLLM_RESPONSES,
    SGLANG_RESPONSES,
    NEMO_GYM,
    HARBOR,
    RLLM,
    TRL,
    VERL_TEXT,
    AREAL,
    ROLL,
    RLLM_TEXT,
)


def _require_format(name: str, value: object) -> Format:
    if not isinstance(value, Format):
        raise ContractError("it is no mismatch_probe.logs.Format")
    if value.name != name:
        raise ContractError(f"its name is {value.name!r}, and its entry point is called {name!r}")
    return value


FORMATS: Final[Registry[Format]] = Registry(
    "log format",
    "mismatch_probe.log_formats",
    {log_format.name: log_format for log_format in _BUILT_IN},
    _require_format,
)
"""By the name that `--format` gives."""

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
    if is_folder(path) and is_run({entry.name for entry in path.iterdir()}):
        raise UsageError(
            f"{path} is a run directory of this tool and no log; `{command_line('report', path)}` reads it"
        )
    files, formats = files_of(path), FORMATS.usable()
    counts = Counter(key for file in files for key, candidate in formats.items() if candidate.fits(look_at(file)))
    if not counts:
        kind = UsageError if files == [path] else NoLogError
        raise kind(_why_none(path, files, formats))
    best = min(_MOST_TELLING_FIRST.index(formats[fitting].holds) for fitting in counts)
    first, *others = [fitting for fitting in counts if formats[fitting].holds == _MOST_TELLING_FIRST[best]]
    if others:
        words = " and ".join(f"{formats[fitting].title} ({counts[fitting]} files)" for fitting in (first, *others))
        raise UsageError(f"{path} holds {words}; name one with --format {'|'.join((first, *others))}")
    return formats[first]


def _why_none(path: Path, files: Sequence[Path], formats: Mapping[str, Format]) -> str:
    if not files:
        what = "holds nothing but hidden files, folders of trackers and run directories of this tool"
        return f"the folder {path} {what if any(path.iterdir()) else 'is empty'}; give a file or a folder of a log"
    other = f", or name a known format with --format: {', '.join(formats)}"
    if files != [path]:
        of_files = (f"{file} has {words}" for file in files if (words := _columns_of(file, formats)))
        columns = next(of_files, "give another folder")
        return f"none of the {len(files)} files below {path} is a log of a known format: {columns}{other}"
    if why := look_at(path).why_other:
        return f"the log {path} cannot be read: {why}; fix it, or give another file"
    columns = _columns_of(path, formats)
    return f"{path} is not a log of a known format: {f'it has {columns}' if columns else 'give another file'}{other}"


_MOST_COLUMNS: Final = 12
_NEAR: Final = 0.5
"""A format is near to a file that has this share of the columns that it needs."""


def _columns_of(path: Path, formats: Mapping[str, Format]) -> str:
    """Which columns a file has, and which the plain format and the nearest other one need besides; empty where it has
    no columns.
    """
    look = look_at(path)
    if not look.keys:
        return ""
    missing = [name for name in NEEDED if name not in look.keys]
    if not missing:
        return f"the columns of {PLAIN.title} in one JSON document; write each response as an object on its own line"
    columns = sorted(look.keys)
    more = f" and {len(columns) - _MOST_COLUMNS} more" if len(columns) > _MOST_COLUMNS else ""
    lacks = [(PLAIN, missing), *_nearest(look, formats)]
    needs = "".join(f"; {candidate.title} also needs {', '.join(names)}" for candidate, names in lacks)
    return f"the columns {', '.join(columns[:_MOST_COLUMNS])}{more}{needs}; rename or add columns"


def _nearest(look: FileLook, formats: Mapping[str, Format]) -> list[tuple[Format, list[str]]]:
    """The format, other than the plain one, of whose columns the file lacks the smallest share, and which; none where
    it lacks more than half of them.
    """
    lacking = [
        (sorted(columns - look.keys), len(columns), candidate)
        for candidate in formats.values()
        if candidate is not PLAIN
        for columns in _columns_needed(look, candidate)
    ]
    near = [(missing, of, each) for missing, of, each in lacking if missing and len(missing) <= _NEAR * of]
    near.sort(key=lambda each: len(each[0]) / each[1])
    return [(each, missing) for missing, _, each in near[:1]]


def _columns_needed(look: FileLook, candidate: Format) -> Iterator[frozenset[str]]:
    """Each set of columns that the format asks a file of this kind for."""
    listener = _Listener(look.kind, look.keys, look.inside, look.words, look.why_other)
    candidate.fits(listener)
    yield from filter(None, listener.columns)


@dataclass(frozen=True)
class _Listener(FileLook):
    """A look that remembers which columns it is asked for."""

    columns: list[frozenset[str]] = field(default_factory=list)

    def lines_with(self, *keys: str) -> bool:
        return self._remember(self.kind is FileKind.LINES, keys, super().lines_with(*keys))

    def json_with(self, *keys: str) -> bool:
        return self._remember(True, keys, super().json_with(*keys))

    def table_with(self, *columns: str) -> bool:
        return self._remember(self.kind is FileKind.PARQUET, columns, super().table_with(*columns))

    def _remember(self, is_of_kind: bool, keys: Sequence[str], answer: bool) -> bool:
        if is_of_kind:
            self.columns.append(frozenset(keys))
        return answer
