"""The compact encoding of Thrift, as far as the header of a parquet page needs it: structs of numbers.

Source of the encoding: github.com/apache/thrift, doc/specs/thrift-compact-protocol.md.

What the pages of a parquet file say of themselves, read before anything is decoded: the footer may say less.
"""

from typing import IO, Any, Final, NamedTuple

from mismatch_probe.reading import Unreadable

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
