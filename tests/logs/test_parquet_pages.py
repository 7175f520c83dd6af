"""Parquet files whose pages are more than their footer says: refused before anything is decoded."""

import io
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import FORMATS
from mismatch_probe.logs.tables import StructReader, TruncatedError
from mismatch_probe.reading import Unreadable
from tests.logs.test_memory import Reader

VALUES = 40_000
COLUMN = "token_ids"


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def page_bytes(step: int, number: int) -> bytes:
    """A field of 32 bits, `step` after the last one."""
    return bytes([step << 4 | 5]) + varint(number << 1 ^ number >> 63)


def page(num_values: int, uncompressed: int, compressed: bytes) -> bytes:
    own = page_bytes(1, num_values) + page_bytes(1, 0) + page_bytes(1, 3) + page_bytes(1, 3) + b"\0"
    return (
        page_bytes(1, 0)
        + page_bytes(1, uncompressed)
        + page_bytes(1, len(compressed))
        + b"\x2c"
        + own
        + b"\0"
        + compressed
    )


def honest(path: Path, **options: Any) -> Path:
    ids = np.random.default_rng(0).integers(0, 2**31, (2, VALUES))
    rows = {"prompt_token_ids": [[1]] * 2, COLUMN: list(ids), "logprobs": [[-0.5] * VALUES] * 2}
    pq.write_table(pa.table(rows), path, **{"use_dictionary": False, "compression": "zstd"} | options)
    return path


def with_page(path: Path, replacement: bytes) -> Path:
    """The log with another first page of its token ids."""
    metadata = pq.read_metadata(path)
    group = metadata.row_group(0)
    column = next(
        group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema.startswith(COLUMN)
    )
    assert len(replacement) < column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + len(replacement)] = replacement
    path.write_bytes(content)
    return path


def zeros(num_bytes: int) -> bytes:
    """So many, compressed."""
    out, block = io.BytesIO(), bytes(2**20)
    with pa.CompressedOutputStream(pa.PythonFile(out, mode="w"), "zstd") as stream:
        for _ in range(num_bytes // len(block)):
            stream.write(block)
        stream.flush()
        return out.getvalue()


def read(path: Path) -> list[Any]:
    return list(FORMATS.built_in["plain"].read(path, lambda finding: None))


@pytest.mark.slow
def test_a_page_that_unpacks_to_more_than_its_footer_says_takes_no_memory(tmp_path):
    num_bytes = 1500 * 2**20
    path = with_page(honest(tmp_path / "a.parquet"), page(2 * VALUES, num_bytes, zeros(num_bytes)))
    assert path.stat().st_size < 10**6
    with closing(Reader()) as reader:
        rows, sentence = reader.within(path)
    assert rows == 0
    assert "column token_ids of its row group 0 has a page that unpacks to 1,572,864,000 bytes" in sentence


@pytest.mark.slow
def test_a_page_with_more_values_than_its_footer_says_is_refused(tmp_path):
    path = with_page(honest(tmp_path / "a.parquet"), page(50_000_000, 4000, bytes(40)))
    with pytest.raises(UsageError, match="has pages of 50,000,000 values or more where its footer says 80,000"):
        read(path)


@pytest.mark.parametrize("size", [-1, 2**31 - 1])
def test_a_page_of_an_impossible_size_is_refused(size, tmp_path):
    path = with_page(honest(tmp_path / "a.parquet"), page(2 * VALUES, size, bytes(40)))
    with pytest.raises(UsageError, match=r"of less than nothing|unpacks to 2,147,483,647 bytes"):
        read(path)


@pytest.mark.parametrize(
    "header", [b"\x15" + b"\xff" * 40, b"\x1c" * 60, b"\x19\x19" * 60, b"\x1e" * 40, b"\x18" + varint(2**40)]
)
def test_a_damaged_header_of_a_page_is_refused(header, tmp_path):
    with pytest.raises(UsageError, match=r"column token_ids of its row group 0.*have it written again"):
        read(with_page(honest(tmp_path / "a.parquet"), header))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": True},
        {"data_page_version": "2.0"},
        {"data_page_size": 1000},
        {"compression": "none", "write_statistics": False},
        {"compression": "snappy", "row_group_size": 1},
        {"use_byte_stream_split": ["logprobs.list.element"]},
    ],
    ids=str,
)
def test_honest_files_of_every_writing_are_read(options, tmp_path):
    path = honest(tmp_path / "a.parquet", **options)
    assert [response.token_ids.size for response in read(path)] == [VALUES] * 2


def test_structs_of_every_kind_of_field_are_passed_over():
    fields = b"".join(
        (
            b"\x11" + b"\x12" + b"\x13\x07",  # true, false, a byte
            b"\x17" + struct.pack("<d", 0.5),
            b"\x18" + varint(3) + b"abc",
            b"\x19" + bytes([3 << 4 | 5]) + varint(2) * 3,
            b"\x19" + bytes([15 << 4 | 1]) + varint(16) + b"\1" * 16,
            b"\x1b" + varint(1) + bytes([5 << 4 | 8]) + varint(2) + varint(1) + b"x",
            b"\x05" + varint(200) + varint(14),  # a field of a number of its own
        )
    )
    reader = StructReader(fields + b"\0after")
    found = reader.struct()
    assert (found, reader.position) == ({1: 1, 2: 0, 3: 7, 100: 7}, len(fields) + 1)
    for end in range(len(fields)):
        with pytest.raises(TruncatedError):
            StructReader(fields[:end]).struct()
    with pytest.raises(Unreadable):
        StructReader(b"\x1c" * 100).struct()
