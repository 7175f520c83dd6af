"""The compact encoding of Thrift, as far as the header of a parquet page needs it: structs of numbers.

Source of the encoding: github.com/apache/thrift, doc/specs/thrift-compact-protocol.md.
"""

from typing import Final

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
            number = number + step if step else _signed(self._varint())
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
            return _signed(self._varint())
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


def _signed(value: int) -> int:
    """A whole number out of its zigzag form."""
    return (value >> 1) ^ -(value & 1)
