"""What the pages of a parquet file say of themselves, read before anything is decoded: the footer may say less."""

from typing import IO, Any, Final, NamedTuple

from mismatch_probe.logs.thrift import Fields, StructReader, TruncatedError
from mismatch_probe.reading import Unreadable

_FIRST_BYTES: Final = 2**10
_MOST_HEADER_BYTES: Final = 2**20
_MOST_PAGE_BYTES: Final = 2**28
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_HEADER_OF: Final = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""The field of a page's header that holds its kind's own one, whose field 1 is the number of values."""


class _Page(NamedTuple):
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
    end, seen = start + column.total_compressed_size, 0
    while start < end and seen < column.num_values:
        page = _page_at(file, start, place)
        if min(page.uncompressed_bytes, page.compressed_bytes, page.num_values) < 0:
            raise Unreadable(f"{place} has a page of less than nothing; have it written again")
        if page.uncompressed_bytes > _MOST_PAGE_BYTES:
            raise Unreadable(
                f"{place} has a page that unpacks to {page.uncompressed_bytes:,} bytes, and more than "
                f"{_MOST_PAGE_BYTES // 2**20} MiB are too many; write it again with a smaller data_page_size"
            )
        if page.kind in (_DATA, _DATA_V2):
            seen += page.num_values
        elif page.num_values > column.num_values:
            seen = page.num_values
        if seen > column.num_values:
            raise Unreadable(
                f"{place} has pages of {seen:,} values or more where its footer says {column.num_values:,}; have it "
                "written again"
            )
        start += page.header_bytes + page.compressed_bytes


def _page_at(file: IO[bytes], offset: int, place: str) -> _Page:
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


def _page(header: Fields, num_bytes: int) -> _Page:
    kind, uncompressed, compressed = (header.get(number) for number in (1, 2, 3))
    if not isinstance(kind, int) or not isinstance(uncompressed, int) or not isinstance(compressed, int):
        raise Unreadable("the header of a page is damaged")
    own = header.get(_HEADER_OF.get(kind, 0))
    num_values = own.get(1) if isinstance(own, dict) else 0
    if not isinstance(num_values, int):
        raise Unreadable("the header of a page is damaged")
    return _Page(kind, uncompressed, compressed, num_values, num_bytes)
