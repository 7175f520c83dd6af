"""Pickles of strangers: nothing that a pickle names is imported or called.

A pickle is a program that may name and call anything. Here a name means what the reader gives for it, or the reading
ends.
"""

import pickle
import pickletools
from collections.abc import Callable, Mapping
from io import BytesIO
from math import prod
from typing import IO, Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.inert import cut_text, plain
from mismatch_probe.reading import Unreadable

_LONGEST_NAME: Final = 80
_FIRST_INSTRUCTIONS: Final = 400
_OF_BROKEN_PICKLES: Final = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, DeprecationWarning, EOFError, ImportError, LookupError,
    MemoryError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class StandIn:
    """What a name in a pickle means here: a function of ours. A pickle can call it and do nothing else to it."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(*arguments, **keywords)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes what a name means")

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes what a name means")


class Unread:
    """What stands for a value that no reader asks for."""

    __slots__ = ()

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


PickleNames = Mapping[str, Any]
"""What each name means, `MODULE.NAME`: a `StandIn`, or a constant that cannot be called."""

UNREAD: Final = StandIn(lambda *_, **__: Unread())


class _StateAlone(Unread):
    """What a pickle gives an object, kept as it is: nothing of it is carried out."""

    __slots__ = ("_state",)
    _state: Any

    def __new__(cls, *_: Any) -> Self:
        instance = super().__new__(cls)
        instance._state = None
        return instance

    def __setstate__(self, state: Any) -> None:
        self._state = state


class _NumpyKind(_StateAlone):
    """A dtype of numpy by its name, `i4`; its state begins with a version and the order of bytes."""

    __slots__ = ("_name",)
    _name: Any

    def __new__(cls, name: Any = None, *_: Any) -> Self:
        instance = super().__new__(cls)
        instance._name = name
        return instance

    @property
    def numbers(self) -> str | None:
        """The dtype of numbers in little-endian order; None for another one."""
        order = self._state[1] if isinstance(self._state, tuple) and len(self._state) > 1 else None
        return f"<{self._name}" if self._name in _KINDS and order in ("<", "|", "=") else None


_KINDS: Final = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


class NumpyArray(_StateAlone):
    """An array of numpy whose numbers are read when they are asked for."""

    __slots__ = ()

    def numbers(self) -> npt.NDArray[Any] | None:
        """None for what is no array of numbers, as an array of objects, or not all there."""
        if not isinstance(self._state, tuple) or len(self._state) != 5:
            return None
        _, shape, kind, is_by_column, data = self._state
        name = kind.numbers if isinstance(kind, _NumpyKind) else None
        if name is None or not isinstance(data, bytes | bytearray) or not isinstance(shape, tuple):
            return None
        dtype = np.dtype(name)
        if any(type(size) is not int or size < 0 for size in shape) or prod(shape) * dtype.itemsize != len(data):
            return None
        return np.frombuffer(data, dtype).reshape(shape, order="F" if is_by_column is True else "C")


def _buffer_array(data: Any = None, kind: Any = None, shape: Any = None, order: Any = None) -> NumpyArray:
    """An array as protocol 5 writes it: its numbers, their dtype, its shape, and whether they lie by columns."""
    array = NumpyArray()
    array.__setstate__((1, shape, kind, order == "F", data))
    return array


def _latin_bytes(text: Any = None, encoding: Any = None) -> Any:
    """Bytes as protocol 2 writes them: a text of the characters below 256."""
    if not isinstance(text, str) or encoding != "latin1":
        return Unread()
    return text.encode("latin1")


NUMPY_NAMES: Final[PickleNames] = {
    "_codecs.encode": StandIn(_latin_bytes),
    "numpy.dtype": StandIn(_NumpyKind),
    "numpy.ndarray": UNREAD,
    **{f"numpy.{core}.numeric._frombuffer": StandIn(_buffer_array) for core in ("_core", "core")},
    **{
        f"numpy.{core}.multiarray.{name}": stand_in
        for core in ("_core", "core")
        for name, stand_in in (("_reconstruct", StandIn(NumpyArray)), ("scalar", UNREAD))
    },
}
"""Arrays of numpy, of which those of numbers can be read."""


def first_words(start: bytes) -> frozenset[str]:
    """The texts and the names, `MODULE.NAME`, in the first instructions of a pickle. None is carried out."""
    words: list[str] = []
    try:
        for number, (instruction, argument, _) in enumerate(pickletools.genops(start)):
            if number > _FIRST_INSTRUCTIONS:
                break
            if instruction.name == "STACK_GLOBAL":
                words.append(".".join(words[-2:]))
            elif isinstance(argument, str):
                words.append(argument.replace(" ", ".") if instruction.name == "GLOBAL" else argument)
    except (ValueError, AttributeError, DeprecationWarning):  # the start was cut, or it is no pickle
        pass
    return frozenset(words)


def texts_of(word: str) -> tuple[bytes, ...]:
    """A short text as the instructions of each protocol from 2 on write it."""
    encoding = word.encode()
    return (
        pickle.BINUNICODE + len(encoding).to_bytes(4, "little") + encoding,
        pickle.SHORT_BINUNICODE + len(encoding).to_bytes(1) + encoding,
    )


def load(data: bytes, names: PickleNames, load_tensor: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle holds. load_tensor: gives what the pickle keeps outside itself.

    Raises:
        Unreadable: it is damaged or cut off, or names something else than `names`.
    """
    try:
        _require_places(data)
        return _RestrictedUnpickler(BytesIO(data), names, load_tensor).load()
    except Unreadable:
        raise
    except _OF_BROKEN_PICKLES as error:
        raise Unreadable("it is a damaged or cut-off pickle") from error


def _require_places(data: bytes) -> None:
    """No instruction puts a value at a place beyond the length of the pickle: Python would make all places before it.
    And all instructions together make no more than is in proportion: one byte can be an empty dictionary.

    Raises:
        ValueError: one does.
        Unreadable: they make more.
        LookupError: it ends too soon, or has an unknown instruction.
    """
    at, length = 0, len(data)
    num_made, most = length, max(_FEW_BYTES, _MOST_BYTES_A_BYTE * length)
    while True:
        code = data[at]
        size = _SIZES[code]
        num_made += _MADE[code]
        if num_made > most:
            raise Unreadable(f"it is a pickle that makes more than {most:,} bytes of its own {length:,}")
        if size > 0:
            at += size
        elif code == _LONG_PUT:
            _require_place(int.from_bytes(data[at + 1 : at + 5], "little"), length)
            at += 5
        elif code == _STOP:
            return
        elif size < 0:  # the argument's length stands before it, in -size bytes
            at += 1 - size + int.from_bytes(data[at + 1 : at + 1 - size], "little")
        else:
            end = at
            for _ in range(_LINES.get(code, 1)):
                end = data.index(b"\n", end + 1)
            if code == _TEXT_PUT:
                _require_place(int(data[at + 1 : end]), length)
            at = end + 1


def _require_place(place: int, length: int) -> None:
    if not 0 <= place <= length:
        raise ValueError("no place in a pickle of this length")


def _size(instruction: pickletools.OpcodeInfo) -> int:
    """Bytes with its argument; less than 0: of the length before it; 0: lines, or an instruction that is looked at."""
    if instruction.code in ("r", "."):
        return 0
    if instruction.arg is None:
        return 1
    lengths = {
        pickletools.TAKEN_FROM_ARGUMENT1: -1,
        pickletools.TAKEN_FROM_ARGUMENT4: -4,
        pickletools.TAKEN_FROM_ARGUMENT4U: -4,
        pickletools.TAKEN_FROM_ARGUMENT8U: -8,
        pickletools.UP_TO_NEWLINE: 0,
    }
    return lengths.get(instruction.arg.n, 1 + instruction.arg.n)


_SIZES: Final = {ord(instruction.code): _size(instruction) for instruction in pickletools.opcodes}
_FEW_BYTES: Final = 2**30
_MOST_BYTES_A_BYTE: Final = 6
"""An honest list of ids and log-probs takes up to 5 times its bytes in a pickle."""
_MADE: Final = dict.fromkeys(_SIZES, 72) | {
    ord(code): num_bytes
    for codes, num_bytes in {
        "}]": 96,
        "\x8f\x91": 256,
        "JMG": 40,
        "NK\x88\x89hjgqrp\x94(0": 16,
        ".": 0,
        "easu\x90": 48,
    }.items()
    for code in codes
}
"""About the bytes that an instruction makes in addition to its argument."""
_LONG_PUT: Final = ord("r")
_TEXT_PUT: Final = ord("p")
_STOP: Final = ord(".")
_LINES: Final = {ord("c"): 2, ord("i"): 2}
"""Instructions with two lines."""


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: PickleNames, load_tensor: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._names = names
        self._load_tensor = load_tensor

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in self._names:
            name_text = cut_text(plain(full_name), _LONGEST_NAME, keep="start")
            raise Unreadable(
                f"it is a pickle that names {name_text}, which could run code and is not needed for numbers"
            )
        return self._names[full_name]

    def persistent_load(self, pid: Any) -> Any:
        if self._load_tensor is None:
            raise pickle.UnpicklingError("it keeps something outside itself")
        return self._load_tensor(pid)
