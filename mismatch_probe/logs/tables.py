"""Parquet tables, a few rows at a time, however little space a writer's encoding gave to many values.

What the pages of a file say of themselves is read before anything is decoded: the footer may say less. A page's header
is a struct of numbers in the compact encoding of Thrift [github.com/apache/thrift,
doc/specs/thrift-compact-protocol.md].
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.logs.row import Row
from mismatch_probe.reading import Unreadable, open_file

Fields = dict[int, "int | Fields"]
"""Whole numbers and structs by the number of their field; fields of other kinds are passed over."""

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_DEEPEST: Final = 16
_LONGEST_VARINT: Final = 10


class TruncatedError(Exception):
    """The bytes end before the struct does."""


class StructReader:
    """Reads structs from the start of `data`; `position` is where the last one ended."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def struct(self, depth: int = 0) -> Fields:
        """
        Raises:
            TruncatedError: the bytes end before.
            Unreadable: it is no struct.
        """
        fields: Fields = {}
        number = 0
        while (head := self._byte()) & 0x0F != _STOP:
            kind, step = head & 0x0F, head >> 4
            number = number + step if step else _as_signed(self._varint())
            value = self._value(kind, depth, in_list=False)
            if value is not None:
                fields[number] = value
        return fields

    def _value(self, kind: int, depth: int, *, in_list: bool) -> "int | Fields | None":
        if depth > _DEEPEST:
            raise Unreadable("the header of a page is nested too deep")
        if kind in (_TRUE, _FALSE):
            if in_list:
                self._skip(1)
            return int(kind == _TRUE)
        if kind == _BYTE:
            return self._byte()
        if kind in (_I16, _I32, _I64):
            return _as_signed(self._varint())
        if kind == _DOUBLE:
            self._skip(8)
        elif kind == _BINARY:
            self._skip(self._varint())
        elif kind in (_LIST, _SET):
            self._skip_list(depth)
        elif kind == _MAP:
            self._skip_map(depth)
        elif kind == _STRUCT:
            return self.struct(depth + 1)
        else:
            raise Unreadable("the header of a page is damaged")
        return None

    def _skip_list(self, depth: int) -> None:
        head = self._byte()
        count = head >> 4
        for _ in range(self._varint() if count == 15 else count):
            self._value(head & 0x0F, depth + 1, in_list=True)

    def _skip_map(self, depth: int) -> None:
        count = self._varint()
        kinds = self._byte() if count else 0
        for _ in range(count):
            self._value(kinds >> 4, depth + 1, in_list=True)
            self._value(kinds & 0x0F, depth + 1, in_list=True)

    def _byte(self) -> int:
        if self.position >= len(self._data):
            raise TruncatedError
        self.position += 1
        return self._data[self.position - 1]

    def _skip(self, count: int) -> None:
        if self.position + count > len(self._data):
            raise TruncatedError
        self.position += count

    def _varint(self) -> int:
        value = 0
        for place in range(_LONGEST_VARINT):
            byte = self._byte()
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value
        raise Unreadable("the header of a page is damaged")


def _as_signed(value: int) -> int:
    """A whole number out of its zigzag form."""
    return (value >> 1) ^ -(value & 1)


_FIRST_BYTES: Final = 2**10
_MOST_HEADER_BYTES: Final = 2**20
_MOST_PAGE_BYTES: Final = 2**28
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_HEADER_OF: Final = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""The field of a page's header that holds its kind's own one, whose field 1 is the number of values."""


class _ParquetPage(NamedTuple):
    kind: int
    uncompressed_bytes: int
    compressed_bytes: int
    num_values: int
    header_bytes: int


def require_bounded_pages(file: IO[bytes], column: Any, place: str) -> None:
    """Refuse a column chunk whose pages unpack to more than a page may have, or hold more values than the footer says.

    column: `pyarrow.parquet.ColumnChunkMetaData`. place: of the column, in a sentence.

    Raises:
        Unreadable: it is such a chunk, or a header of a page cannot be read.
    """
    first = column.dictionary_page_offset if column.has_dictionary_page else None
    start = column.data_page_offset if not first else min(first, column.data_page_offset)
    end, num_seen = start + column.total_compressed_size, 0
    while start < end and num_seen < column.num_values:
        page = _page_at(file, start, place)
        if min(page.uncompressed_bytes, page.compressed_bytes, page.num_values) < 0:
            raise Unreadable(f"{place} has a page of less than nothing; have it written again")
        if page.uncompressed_bytes > _MOST_PAGE_BYTES:
            raise Unreadable(
                f"{place} has a page that unpacks to {page.uncompressed_bytes:,} bytes, and more than "
                f"{_MOST_PAGE_BYTES // 2**20} MiB are too many; write it again with a smaller data_page_size"
            )
        if page.kind in (_DATA, _DATA_V2):
            num_seen += page.num_values
        elif page.num_values > column.num_values:
            num_seen = page.num_values
        if num_seen > column.num_values:
            raise Unreadable(
                f"{place} has pages of {num_seen:,} values or more where its footer says {column.num_values:,}; have "
                "it written again"
            )
        start += page.header_bytes + page.compressed_bytes


def _page_at(file: IO[bytes], offset: int, place: str) -> _ParquetPage:
    for most in (_FIRST_BYTES, _MOST_HEADER_BYTES):
        file.seek(offset)
        reader = StructReader(file.read(most))
        try:
            return _page(reader.struct(), reader.position)
        except TruncatedError:
            continue
        except Unreadable as error:
            raise Unreadable(f"{place}: {error}; have it written again") from error
    raise Unreadable(f"{place} has a page whose header does not end; have it written again")


def _page(header: Fields, num_bytes: int) -> _ParquetPage:
    kind, num_uncompressed, num_compressed = (header.get(number) for number in (1, 2, 3))
    if not isinstance(kind, int) or not isinstance(num_uncompressed, int) or not isinstance(num_compressed, int):
        raise Unreadable("the header of a page is damaged")
    own = header.get(_HEADER_OF.get(kind, 0))
    num_values = own.get(1) if isinstance(own, dict) else 0
    if not isinstance(num_values, int):
        raise Unreadable("the header of a page is damaged")
    return _ParquetPage(kind, num_uncompressed, num_compressed, num_values, num_bytes)


LONGEST_LIST: Final = 2**22
"""Values of a row's list: more than any model's context has tokens."""
_MOST_ROWS_AT_ONCE: Final = 1024
_VALUES_AT_ONCE: Final = 2**17
"""Of each column, by the mean length of its lists."""
_MOST_VALUES_AT_ONCE: Final = 2**23
"""Of each column, however the lengths of its lists differ."""
_MOST_VALUES_OF_A_GROUP: Final = 2**27
"""Of each column in a row group: a single row may hold all of them."""
_MOST_BYTES_OF_A_ROW: Final = 2**28
_BYTES_AT_ONCE: Final = 2**20
_BYTES_OF_A_VALUE: Final = 64
"""Of a Python object."""
_MOST_VALUES_A_BYTE: Final = 32
_FEW_VALUES: Final = 2**24
_FEWEST_BYTES_OF_A_ROW: Final = 64
_FEW_ROWS: Final = 2**18
_TEXTS: Final = frozenset({"STRING", "NONE", "JSON", "ENUM"})
_REWRITE: Final = "write it again with a smaller row_group_size"


def read_table(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    """Each row, with those of `columns` that the table has. Lists of numbers are arrays, in which null is NaN.

    Raises:
        UsageError: the file cannot be read, is no parquet, or holds far more than its bytes can honestly hold.
    """
    try:
        with open_file(path) as file, pq.ParquetFile(file, buffer_size=_BYTES_AT_ONCE) as table:
            present = [name for name in columns if name in table.schema_arrow.names]
            _require_bounded(table, present, os.fstat(file.fileno()).st_size)
            _require_bounded_pages(table, present, file)
            texts = _paths_of_texts(table)
            file.seek(0)
            with pq.ParquetFile(file, buffer_size=_BYTES_AT_ONCE, read_dictionary=texts) as reader:
                size = rows_at_once(table.metadata)
                values = [_column(reader, name, size) for name in present]
                for number, cells in enumerate(zip(*values, strict=True)):
                    yield Row(f"row {number} of {path}", dict(zip(present, cells, strict=True)))
    except FileNotFoundError as error:
        raise UsageError(f"there is no log {path}") from error
    except Unreadable as error:
        raise UsageError(f"the log {path} cannot be read: {error}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the log {path} is no readable parquet ({message_of(error)}); have it written again"
        ) from error


def rows_at_once(metadata: pq.FileMetaData) -> int:
    """So many that their columns fit a small memory, by the mean length of a row's lists."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [(group.column(index), group.num_rows) for group in groups for index in range(group.num_columns)]
    longest = max((column.num_values / max(1, num_rows) for column, num_rows in columns), default=1)
    return int(min(_MOST_ROWS_AT_ONCE, max(1, _VALUES_AT_ONCE / max(1, longest))))


def _require_bounded(table: pq.ParquetFile, names: list[str], num_bytes: int) -> None:
    """Refuse a table by its metadata, before anything of it is decoded.

    Raises:
        Unreadable: it has more rows or values than its bytes can honestly hold, or too many in one row.
    """
    metadata = table.metadata
    if metadata.num_rows > max(_FEW_ROWS, num_bytes // _FEWEST_BYTES_OF_A_ROW):
        raise Unreadable(
            f"it has {metadata.num_rows:,} rows in {num_bytes:,} bytes, fewer than {_FEWEST_BYTES_OF_A_ROW} for a row, "
            "which no log of responses has; leave it out"
        )
    values = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema.partition(".")[0]
            if name not in names:
                continue
            place = f"column {name} of its row group {group_number}"
            values += column.num_values
            if column.num_values > group.num_rows * LONGEST_LIST:
                raise Unreadable(
                    f"{place} has a row with more than {LONGEST_LIST:,} values, more than any response; remove the row"
                )
            if column.num_values > _MOST_VALUES_OF_A_GROUP:
                raise Unreadable(f"{place} has more than {_MOST_VALUES_OF_A_GROUP:,} values; {_REWRITE}")
    if values > max(_FEW_VALUES, num_bytes * _MOST_VALUES_A_BYTE):
        raise Unreadable(
            f"it has {values:,} values in {num_bytes:,} bytes, more than {_MOST_VALUES_A_BYTE} a byte, which no log of "
            "responses has; leave it out"
        )


def _require_bounded_pages(table: pq.ParquetFile, names: list[str], file: IO[bytes]) -> None:
    for group_number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(group_number)
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema.partition(".")[0]
            if name in names:
                require_bounded_pages(file, column, f"column {name} of its row group {group_number}")


def _column(table: pq.ParquetFile, name: str, size: int) -> Iterator[Any]:
    """What a column has in each row. Columns are decoded one by one, so that the first that is too large ends it.

    Raises:
        Unreadable: a row or a few rows of it are too large.
    """
    number = 0
    for batch in table.iter_batches(batch_size=size, columns=[name]):
        column = batch.column(0)
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if is_list:
            _require_short(column, name, number)
        if is_list and _is_number(column.type.value_type):
            for row in column:
                yield row.values.to_numpy(zero_copy_only=False) if row.is_valid else None
        else:
            for index in range(len(column)):
                if _decoded_bytes(column.slice(index, 1)) > _MOST_BYTES_OF_A_ROW:
                    raise Unreadable(
                        f"column {name} of its row {number + index} is more than {_MOST_BYTES_OF_A_ROW // 2**20} MiB "
                        "once it is decoded; remove the row"
                    )
                yield column[index].as_py()
        number += len(column)


def _require_short(column: pa.Array, name: str, first: int) -> None:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    if lengths.size and lengths.max() > LONGEST_LIST:
        raise Unreadable(
            f"column {name} of its row {first + int(lengths.argmax())} has {int(lengths.max()):,} values, and more "
            f"than {LONGEST_LIST:,} are longer than any response; remove the row"
        )
    if lengths.sum() > _MOST_VALUES_AT_ONCE:
        raise Unreadable(
            f"column {name} of its rows {first} to {first + lengths.size - 1} has {int(lengths.sum()):,} values, far "
            "more than the other rows; write the long rows to a file of their own"
        )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _decoded_bytes(column: pa.Array) -> int:
    """About what the values of a column take as Python objects, each text as often as it stands there."""
    kind, own = column.type, len(column) * _BYTES_OF_A_VALUE
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(column.dictionary) if _is_text(kind.value_type) else None
        return own + (0 if lengths is None else pc.sum(lengths.take(column.indices)).as_py() or 0)
    if _is_text(kind):
        return own + (pc.sum(pc.binary_length(column)).as_py() or 0)
    if pa.types.is_map(kind):
        rows = (row for row in column if row.is_valid)
        return own + sum(_decoded_bytes(part) for row in rows for part in row.values.flatten())
    if pa.types.is_struct(kind):
        return own + sum(_decoded_bytes(part) for part in column.flatten())
    if pa.types.is_nested(kind):
        return own + _decoded_bytes(column.flatten())
    return own


def _is_text(kind: pa.DataType) -> bool:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _paths_of_texts(table: pq.ParquetFile) -> list[str]:
    """The columns of texts: a text that many rows share is kept once as long as it is not asked for."""
    leaves = (table.schema.column(index) for index in range(len(table.schema)))
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type in _TEXTS]
