"""Files of metrics that trainers and trackers write: no tokens, a number a step. Read line by line, in bounded memory.

Only names that `logs.metric_names` has are kept.
"""

import csv
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import TextIOWrapper
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any, Final

from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.logs.formats import recognise
from mismatch_probe.logs.look import files_of
from mismatch_probe.logs.metric_names import metric_names
from mismatch_probe.logs.row import LONGEST_LINE_BYTES, as_float, next_line, parse_line, size_of
from mismatch_probe.logs.tracker_files import is_events, is_sqlite, read_console, read_events, read_trackio
from mismatch_probe.reading import Unreadable, open_file

FORMAT: Final = "metrics"
"""The name that `--format` gives to all of them."""
MetricEntry = tuple[int, str, float]
"""A step, the name of a metric, its value."""

_STEP_KEYS: Final = (
    *("step", "_step", "Step", "global_step", "trainer/global_step", "training/global_step", "train/step"),
    "rollout/step",
)
_MOST_VALUES: Final = 2**20
_MOST_UNKNOWN: Final = 4096
_LONGEST_TEXT_LINE: Final = 2**20
_LARGEST_STEP: Final = 2**53
_MOST_NAMED: Final = 6
_OPEN_QUOTES: Final = "unexpected end of data"
"""What Python's reader of CSV says where the text ends within quotes."""


@dataclass
class MetricLog:
    """The curves of a file, or of a folder of files of one kind."""

    kind: str = ""
    """What the file is, in words."""
    names: Container[str] = field(default_factory=metric_names)
    """The names that are read."""
    files: list[Path] = field(default_factory=list)
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """The values of a name that is known, by step."""
    unknown: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    cut_off: str | None = None
    """A sentence where the last line or record of a file was being written; it is the last of the notes."""
    num_values: int = 0
    num_rewritten: int = 0

    def add(self, entries: Iterable[MetricEntry]) -> None:
        """
        Raises:
            Unreadable: there are more values than a training run has.
        """
        for step, name, value in entries:
            if name not in self.names:
                if len(self.unknown) < _MOST_UNKNOWN:
                    self.unknown.add(name[:_MOST_UNKNOWN])
                continue
            curve = self.series.setdefault(name, {})
            self.num_rewritten += step in curve and curve[step] != value
            curve[step] = value
            self.num_values += 1
            if self.num_values > _MOST_VALUES:
                raise Unreadable(f"it has more than {_MOST_VALUES:,} values of known metrics; give a part of it")


@dataclass(frozen=True)
class _Kind:
    """One way to write metrics: `fits` looks at the first bytes."""

    words: str
    fits: Callable[[bytes], bool]
    entries: Callable[[Path, MetricLog], Iterator[MetricEntry]]


def metrics_of(path: Path, name: str | None) -> MetricLog | None:
    """The metrics of a file or a folder in which no log of tokens is recognised; None where one is. name: as `--format`
    gives it, which insists on a log of tokens, or on metrics.

    Raises:
        UsageError: as `recognise`, where the path holds neither; as `read_metric_log`.
    """
    if name == FORMAT:
        log = read_metric_log(path, must_be_metrics=True)
        if log is None:
            raise UsageError(f"{path} has no metric of a known name; docs/logs.md has the names that are read")
        return log
    try:
        recognise(path, name)
    except UsageError:
        log = read_metric_log(path) if name is None else None
        if log is None:
            raise
        return log
    return None


def read_metric_log(
    path: Path, *, must_be_metrics: bool = False, names: Container[str] | None = None
) -> MetricLog | None:
    """The metrics of a file, or of the files of one kind in a folder; None where no name of a metric is known.

    must_be_metrics: JSON that cannot be read is an error too; otherwise it may be a log of something else. names: those
    that are read, of the mismatch unless given.

    Raises:
        UsageError: nothing is there, a file cannot be read, or a folder has metrics of several kinds.
    """
    paths = files_of(path)
    logs: dict[str, MetricLog] = {}
    unknown: set[str] = set()
    for file in paths:
        kind = _kind_of(file)
        if kind is None or (kind is _CONSOLE and paths != [path] and file.suffix not in _CONSOLE_ENDINGS):
            continue
        log = logs.get(kind.words) or MetricLog(kind.words, metric_names() if names is None else names)
        num_before = log.num_values
        try:
            log.add(kind.entries(file, log))
        except FileNotFoundError as error:
            raise UsageError(f"there is no log {file}") from error
        except (Unreadable, UnicodeDecodeError, csv.Error) as error:
            if kind is _LINES and not log.num_values and not must_be_metrics:
                continue
            raise UsageError(f"the log {file} cannot be read: {message_of(error)}") from error
        if log.num_values > num_before:
            log.files.append(file)
            logs[kind.words] = log
        elif kind is not _CONSOLE:
            unknown |= log.unknown
    if len(logs) > 1:
        kinds = " and ".join(f"{log.kind} ({log.files[0].name})" for log in logs.values())
        raise UsageError(f"{path} holds metrics as {kinds}; name one of the files")
    if not logs and unknown:
        names = ", ".join(sorted(unknown)[:_MOST_NAMED])
        raise UsageError(
            f"{path} holds metrics ({names}), and none of them is known as one of the mismatch; docs/logs.md has the "
            "names that are read"
        )
    only_log = next(iter(logs.values()), None)
    if only_log is not None and only_log.num_rewritten:
        only_log.notes.append(
            f"{only_log.num_rewritten:,} values stand a second time at their step, as after a restart; the last counts"
        )
    if only_log is not None and only_log.cut_off is not None:
        only_log.notes.append(only_log.cut_off)
    return only_log


def may_become_metrics(path: Path) -> bool:
    """Whether a file without metrics is empty or a text, in which a trainer's first step may still come, or its first
    step is being written.
    """
    return _kind_of(path) is _CONSOLE or has_half_a_step(path)


def has_half_a_step(path: Path) -> bool:
    """Whether a file is the beginning of a first line of JSON, or of a CSV without a whole row below its header."""
    kind = _kind_of(path)
    try:
        return (kind is _LINES and _is_part_of_a_line(path)) or (kind is _TABLE and _lacks_row(path))
    except (FileNotFoundError, Unreadable):
        return False


def _is_part_of_a_line(path: Path) -> bool:
    with open_file(path) as file:
        return not next_line(file, size_of(file)).endswith(b"\n")


def _lacks_row(path: Path) -> bool:
    """Whether a CSV has no whole row below its header. A row ends where its line does, outside of quotes."""
    with open_file(path) as file, TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="") as text:
        lines = iter(partial(text.readline, _LONGEST_TEXT_LINE), "")
        rows = csv.reader(takewhile(lambda line: line.endswith(("\n", "\r")), lines), strict=True)
        try:
            return len(list(islice(filter(any, rows), 2))) < 2
        except csv.Error as error:
            return _OPEN_QUOTES in str(error)


def _kind_of(path: Path) -> _Kind | None:
    try:
        with open_file(path) as file:
            start = file.read(4096)
    except (FileNotFoundError, Unreadable):
        return None
    return next((kind for kind in _KINDS if kind.fits(start)), None)


def _step_in_line(columns: dict[str, Any]) -> int | None:
    for key in _STEP_KEYS:
        value = columns.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP:
            return int(value) if value == int(value) else None
    return None


def _line_entries(path: Path, log: MetricLog) -> Iterator[MetricEntry]:
    """A line a step, `{"step": 3, NAME: 0.1}`, or `{"step": 3, "data": {NAME: 0.1}}` as verl's file logger writes."""
    num_without = number = 0
    with open_file(path) as file:
        remaining = size_of(file)
        while line := next_line(file, remaining):
            remaining -= len(line)
            number += 1
            if not line.strip():
                continue
            try:
                columns = parse_line(line)
            except Unreadable as error:
                if line.endswith(b"\n"):
                    if not log.num_values and line.strip() in (b"{", b"["):
                        file.seek(0)
                        yield from _document_entries(file)
                        return
                    raise Unreadable(f"line {number}: {error}") from error
                log.cut_off = f"the last line of {path.name} was being written, and is left out"
                break
            if not isinstance(columns, dict):
                raise Unreadable(f"line {number} is no JSON object")
            if not log.num_values and columns and all(isinstance(values, dict) for values in columns.values()):
                yield from _curves_of(columns)
                continue
            step = _step_in_line(columns)
            inside = columns.get("data")
            values = {**columns, **inside} if isinstance(inside, dict) else columns
            step = _step_in_line(values) if step is None else step
            if step is None:
                num_without += 1
                continue
            yield from (
                (step, name, as_float(value)) for name, value in values.items() if _is_metric_value(name, value)
            )
    if num_without:
        log.notes.append(f"{num_without:,} lines of {path.name} have no step, and are left out")


def _document_entries(file: IO[bytes]) -> Iterator[MetricEntry]:
    """`{NAME: {"3": 0.1}}`, as NeMo-RL's `tests/json_dump_tb_logs.py` writes event files."""
    content = file.read(LONGEST_LINE_BYTES + 1)
    if len(content) > LONGEST_LINE_BYTES:
        raise Unreadable(f"it is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
    document = parse_line(content)
    if not isinstance(document, dict):
        raise Unreadable("it is no JSON object")
    yield from _curves_of(document)


def _curves_of(document: dict[str, Any]) -> Iterator[MetricEntry]:
    for name, values in document.items():
        if isinstance(values, dict):
            for step, value in values.items():
                if step.isdecimal() and len(step) < 16 and _is_metric_value(name, value):
                    yield int(step), name, as_float(value)


def _is_metric_value(name: str, value: Any) -> bool:
    return name not in _STEP_KEYS and type(value) in (int, float)


def _console_entries(path: Path, log: MetricLog) -> Iterator[MetricEntry]:
    def note(sentence: str) -> None:
        log.cut_off = sentence

    return read_console(path, note)


def _table_entries(path: Path, log: MetricLog) -> Iterator[MetricEntry]:
    """A CSV of W&B: of a chart, whose columns are `RUN - NAME`, or of a run's history, whose columns are names."""
    with open_file(path) as file, TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(_bounded_lines(text, path.name, log))
        header = next(rows, [])
        step_column = next((number for number, name in enumerate(header) if name in _STEP_KEYS), None)
        if step_column is None:
            raise Unreadable("its header has no column Step or _step")
        columns, num_short, words = _columns_of_metrics(header), 0, []
        for row in rows:
            if len(row) != len(header):
                num_short += any(cell.strip() for cell in row)
                continue
            if not (step := row[step_column].strip()):
                continue
            number = _as_number(step)
            if number is None or not 0 <= number < _LARGEST_STEP or not number.is_integer():
                raise Unreadable(f"line {rows.line_num}: its step {step!r:.40} is no whole number from 0 on")
            for place, name in columns.items():
                value = _as_number(row[place])
                if value is not None:
                    yield int(number), name, value
                elif row[place].strip() and name in log.names:
                    words.append(f"{row[place]!r:.40} in line {rows.line_num}")
    if num_short:
        lines, has, are = ("line", "has", "is") if num_short == 1 else ("lines", "have", "are")
        cells = "another number of cells than its header"
        log.notes.append(f"{num_short:,} {lines} of {path.name} {has} {cells}, and {are} left out")
    if words:
        cells, hold, are = ("cell", "holds", "is") if len(words) == 1 else ("cells", "hold", "are")
        first = f"the first is {words[0]}"
        log.notes.append(f"{len(words):,} {cells} of {path.name} {hold} no number, and {are} left out: {first}")


def _columns_of_metrics(header: Sequence[str]) -> dict[int, str]:
    """The name of the metric of each column.

    Raises:
        Unreadable: a metric stands there for several runs.
    """
    columns: dict[int, str] = {}
    for place, title in enumerate(header):
        name = title.rpartition(" - ")[2]
        if title in _STEP_KEYS or name.endswith(("__MIN", "__MAX")):
            continue
        if name in columns.values() and name in metric_names():
            raise Unreadable(f"it has {name} of several runs; export one run, or remove the columns of the others")
        columns[place] = name
    return columns


def _bounded_lines(text: IO[str], name: str, log: MetricLog) -> Iterator[str]:
    while line := text.readline(_LONGEST_TEXT_LINE):
        if len(line) == _LONGEST_TEXT_LINE:
            raise Unreadable(f"a line of it is longer than {_LONGEST_TEXT_LINE // 2**20} MiB")
        if not line.endswith(("\n", "\r")):
            log.cut_off = f"the last line of {name} has no end yet"
        yield line


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_table(start: bytes) -> bool:
    header = start.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].decode("utf-8", errors="replace")
    try:
        titles = next(csv.reader([header.strip()]), [])
    except csv.Error:
        return False
    return len(titles) > 1 and not set(titles).isdisjoint(_STEP_KEYS)


def _event_entries(path: Path, log: MetricLog) -> Iterator[MetricEntry]:
    def note(sentence: str) -> None:
        log.cut_off = sentence

    return read_events(path, note)


def _trackio_entries(path: Path, log: MetricLog) -> Iterator[MetricEntry]:
    return read_trackio(path, log.notes.append)


_CONSOLE: Final = _Kind("console lines", lambda start: b"\0" not in start, _console_entries)
_CONSOLE_ENDINGS: Final = (".log", ".out", ".txt")
_LINES: Final = _Kind("JSON lines", lambda start: start.lstrip(b"\xef\xbb\xbf \r\n").startswith(b"{"), _line_entries)
_TABLE: Final = _Kind("a CSV", _is_table, _table_entries)
_KINDS: Final = (
    _Kind("TensorBoard event files", is_events, _event_entries),
    _Kind("a trackio database", is_sqlite, _trackio_entries),
    _LINES,
    _TABLE,
    _CONSOLE,
)
