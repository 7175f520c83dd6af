"""Files of trackers and consoles: TensorBoard's event files, trackio's databases and what trainers print, read without
their libraries and bounded.
"""

import re
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from mismatch_probe.errors import message_of
from mismatch_probe.logs.metric_names import console_words
from mismatch_probe.logs.row import as_float, parse_line, size_of
from mismatch_probe.reading import Unreadable, is_there, open_file, parse_json

TellNote = Callable[[str], None]

_LARGEST_EVENT: Final = 2**16
"""Bytes of an event that is read: one of scalars has hundreds; images and histograms are passed over."""
_MASK_DELTA: Final = 0xA282EAD8
_POLYNOMIAL: Final = 0x82F63B78
"""Of CRC-32C, reflected."""
_SQLITE: Final = b"SQLite format 3\0"
_LONGEST_ROW: Final = 2**22
_MOST_WORK: Final = 2**31
_WORK_BETWEEN_LOOKS: Final = 2**16
_LONGEST_CONSOLE_LINE: Final = 2**20
_LARGEST_STEP: Final = 2**53


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC: Final = _crc_table()


def masked_crc(data: bytes) -> int:
    """TensorFlow's masked CRC-32C of a record."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def is_events(start: bytes) -> bool:
    """Whether the bytes begin a file of TensorFlow records: a length, and its checksum."""
    return len(start) >= 12 and struct.unpack("<I", start[8:12])[0] == masked_crc(start[:8])


def read_events(path: Path, note: TellNote) -> Iterator[tuple[int, str, float]]:
    """Step, tag and value of each scalar of an event file, as PyTorch, tensorboardX and TensorFlow write them.

    Raises:
        FileNotFoundError: nothing is there.
        Unreadable: a record is damaged.
    """
    with open_file(path) as file:
        end = size_of(file)
        while (place := file.tell()) < end:
            head = file.read(12)
            if len(head) < 12:
                note(f"the last record of {path.name} was being written, and is left out")
                return
            length, checksum = struct.unpack("<QI", head)
            if masked_crc(head[:8]) != checksum:
                raise Unreadable(f"the record at byte {place:,} is damaged: its length has another checksum")
            if place + 16 + length > end:
                note(f"the last record of {path.name} was being written, and is left out")
                return
            if length > _LARGEST_EVENT:
                file.seek(length + 4, 1)
                continue
            event = file.read(length)
            if masked_crc(event) != struct.unpack("<I", file.read(4))[0]:
                raise Unreadable(f"the record at byte {place:,} is damaged: it has another checksum")
            yield from _scalars(event)


def _scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    """Of a `tensorboard.Event`: 2 is the step, 5 a summary, whose 1 are values with 1 the tag, 2 a number, 8 a tensor
    (tensorboard/compat/proto/{event,summary,tensor}.proto).
    """
    step, summaries = 0, []
    for number, value in _fields(event):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and isinstance(value, bytes):
                fields = dict(_fields(value))
                tag, scalar = fields.get(1), _scalar_of(fields)
                if isinstance(tag, bytes) and scalar is not None and step < 2**53:
                    yield step, tag.decode("utf-8", errors="replace"), scalar


def _scalar_of(fields: dict[int, int | bytes]) -> float | None:
    """The plain number of a value, or that of a tensor of one float or double."""
    plain, tensor = fields.get(2), fields.get(8)
    if isinstance(plain, bytes) and len(plain) == 4:
        return float(struct.unpack("<f", plain)[0])
    if not isinstance(tensor, bytes):
        return None
    inside = dict(_fields(tensor))
    for form, size, numbers in (("<f", 4, (5, 4)), ("<d", 8, (6, 4))):
        for number in numbers:
            content = inside.get(number)
            if inside.get(1) == (1 if size == 4 else 2) and isinstance(content, bytes) and len(content) == size:
                return float(struct.unpack(form, content)[0])
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a protocol buffer: a number for a varint, bytes for the others.

    Raises:
        Unreadable: it is malformed.
    """
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        wire = key & 7
        if wire == 0:
            value, place = _read_varint(message, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, place = _read_varint(message, place)
        if size is None or place + size > len(message):
            raise Unreadable("an event of it is malformed")
        yield key >> 3, message[place : place + size]
        place += size


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise Unreadable("an event of it is malformed")


def is_sqlite(start: bytes) -> bool:
    return start.startswith(_SQLITE)


def read_trackio(path: Path, note: TellNote) -> Iterator[tuple[int, str, float]]:
    """Step, name and value of the run of a trackio database that was written to last (trackio/sqlite_storage.py).

    Nothing of the file is run: its views, triggers and functions are not used, and what it costs is bounded.

    Raises:
        Unreadable: it is no such database, or asks for too much.
    """
    with open_file(path):
        pass
    mode = "mode=ro" if is_there(path.with_name(f"{path.name}-wal")) else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as database:
            yield from _trackio_rows(database, path, note)
    except sqlite3.Error as error:
        raise Unreadable(f"the database cannot be read ({message_of(error)})") from error


def _trackio_rows(database: sqlite3.Connection, path: Path, note: TellNote) -> Iterator[tuple[int, str, float]]:
    work = iter(range(_MOST_WORK // _WORK_BETWEEN_LOOKS))
    database.set_progress_handler(lambda: next(work, None) is None, _WORK_BETWEEN_LOOKS)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_ROW)
    database.execute("PRAGMA trusted_schema = OFF")
    kinds = dict(database.execute("SELECT name, type FROM sqlite_master WHERE name = 'metrics'"))
    if kinds.get("metrics") != "table":
        raise Unreadable("it is a database without trackio's table metrics")
    runs = [name for (name,) in database.execute("SELECT run_name FROM metrics GROUP BY run_name ORDER BY MAX(id)")]
    if len(runs) > 1:
        note(f"{path.name} holds {len(runs)} runs; read is the one written to last, {str(runs[-1])[:80]}")
    rows = database.execute(
        "SELECT step, metrics FROM metrics WHERE run_name IS ? ORDER BY id", (runs[-1] if runs else None,)
    )
    for step, text in rows:
        if type(step) is not int or not 0 <= step < 2**53:
            raise Unreadable("a step of it is no whole number from 0 on")
        values = parse_json(_json_text(text), constants=True)
        if isinstance(values, dict):
            yield from ((step, name, as_float(value)) for name, value in values.items() if type(value) in (int, float))


def _json_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, str):
        return value
    raise Unreadable("a row of its metrics is no text")


_NUMBER: Final = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_VERL: Final = re.compile(r"(?:^|\s)step:(\d{1,15}) - ")
_VERL_ITEM: Final = re.compile(rf"([^\s:]{{1,200}}):(?:[\w.]{{1,30}}\()?({_NUMBER})")
_DICT: Final = re.compile(r"\b(?:step|rollout|perf) (\d{1,15}): \{")
_DICT_ITEM: Final = re.compile(rf"'([^'\s]{{1,200}})': '?(?:[\w.]{{1,30}}\()?({_NUMBER})")
_ROLL: Final = re.compile(r"\bmetrics_tag: (\{.*\})\s*$")
_AREAL: Final = re.compile(r"\bTrain step (\d{1,15})/\d+ done\.")
_AREAL_CELLS: Final = re.compile(rf"│ *([^│\s]{{1,200}}) *│ *({_NUMBER}) *(?=│)")
_STEP: Final = re.compile(r"(?:^|[^\w])Step (\d{1,15})(?::\s*$|/\d| \|)")


def read_console(path: Path, note: TellNote) -> Iterator[tuple[int, str, float]]:
    """What trainers print: verl's and rllm's `step:3 - NAME:0.1 - `, slime's `step 3: {'NAME': 0.1}`, SkyRL's `Step 3:`
    with such a dictionary below, prime-rl's `Step 3 | ... | Mismatch KL 0.001`, NeMo-RL's list under `Step 3/100`,
    ROLL's `metrics_tag: {"step": 3, "metrics": {}}`, AReaL's table under `Train step 4/100 done.`, which is step 3.

    Raises:
        FileNotFoundError: nothing is there.
        Unreadable: the file cannot be read.
    """
    step: int | None = None
    with open_file(path) as file:
        while raw := file.readline(_LONGEST_CONSOLE_LINE):
            if not raw.endswith(b"\n") and len(raw) < _LONGEST_CONSOLE_LINE:
                note(f"the last line of {path.name} was being written, and is left out")
                break
            line = _COLOUR.sub("", raw.decode("utf-8", errors="replace"))
            if (match := _VERL.search(line)) is not None:
                for item in line[match.end() :].split(" - "):
                    if (pair := _VERL_ITEM.match(item.strip())) is not None:
                        yield int(match[1]), pair[1], float(pair[2])
            elif (match := _DICT.search(line)) is not None:
                yield from _dictionary_entries(int(match[1]), line[match.end() :])
            elif (match := _ROLL.search(line)) is not None:
                yield from _entries_of_roll(match[1])
            elif (match := _AREAL.search(line)) is not None:
                step = int(match[1]) - 1
            else:
                if (match := _STEP.search(line)) is not None:
                    step = int(match[1])
                if step is not None:
                    yield from _dictionary_entries(step, line)
                    yield from _worded_entries(step, line)
                    yield from ((step, name, float(value)) for name, value in _AREAL_CELLS.findall(line))


def _dictionary_entries(step: int, text: str) -> Iterator[tuple[int, str, float]]:
    yield from ((step, name, float(value)) for name, value in _DICT_ITEM.findall(text))


def _worded_entries(step: int, line: str) -> Iterator[tuple[int, str, float]]:
    for words, name in console_words().items():
        place = line.find(words)
        if place >= 0 and (number := re.match(_NUMBER, line[place + len(words) :])) is not None:
            yield step, name, float(number[0])


def _entries_of_roll(text: str) -> Iterator[tuple[int, str, float]]:
    try:
        content = parse_line(text.encode())
    except Unreadable:  # a message that only looks like one
        return
    step, metrics = content.get("step"), content.get("metrics")
    if type(step) is int and 0 <= step < _LARGEST_STEP and isinstance(metrics, dict):
        yield from ((step, name, float(value)) for name, value in metrics.items() if type(value) in (int, float))
