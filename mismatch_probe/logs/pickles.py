"""Pickles of strangers: nothing that a pickle names is imported or called.

A pickle is a program that may name and call anything. Here a name means what the reader gives for it, or the reading
ends.
"""

import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, Final, NoReturn

from mismatch_probe.inert import plain, shortened
from mismatch_probe.reading import Unreadable

_LONGEST_NAME: Final = 80
_FIRST_INSTRUCTIONS: Final = 400
_OF_BROKEN_PICKLES: Final = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class StandIn:
    """What a name in a pickle means here: a function of ours. A pickle can call it and do nothing else to it."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes what a name means")

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes what a name means")


class Unread:
    """What stands for a value that no reader asks for."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


Names = Mapping[str, Any]
"""What each name means, `MODULE.NAME`: a `StandIn`, or a constant that cannot be called."""

UNREAD: Final = StandIn(lambda *_, **__: Unread())

NUMPY_NAMES: Final[Names] = dict.fromkeys(
    (
        "_codecs.encode",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
    ),
    UNREAD,
)
"""Arrays of numpy that stand beside what is read, images for instance."""


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
    except (ValueError, AttributeError):  # the start was cut, or it is no pickle
        pass
    return frozenset(words)


def load(file: IO[bytes], names: Names, stored: Callable[[Any], Any] | None = None) -> Any:
    """What the pickle holds. stored: gives what the pickle keeps outside itself.

    Raises:
        Unreadable: it is damaged or cut off, or names something else than `names`.
    """
    try:
        return _Restricted(file, names, stored).load()
    except Unreadable:
        raise
    except _OF_BROKEN_PICKLES as error:
        raise Unreadable("it is a damaged or cut-off pickle") from error


class _Restricted(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: Names, stored: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._names = names
        self._stored = stored

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in self._names:
            shown = shortened(plain(full_name), _LONGEST_NAME, keep="start")
            raise Unreadable(f"it is a pickle that names {shown}, which could run code and is not needed for numbers")
        return self._names[full_name]

    def persistent_load(self, pid: Any) -> Any:
        if self._stored is None:
            raise pickle.UnpicklingError("it keeps something outside itself")
        return self._stored(pid)
