"""What the outside does to the process: signals end it in an orderly way, a reader of its streams may go away.

Ctrl-C, SIGTERM and SIGHUP have exit codes of their own.
"""

import _thread
import fcntl
import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn, TextIO

from mismatch_probe.errors import HungUp, Interrupted, StorageError, Terminated

_REQUESTS: Final[dict[int, type[Interrupted]]] = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}
_PATIENCE_SECONDS: Final = 15.0
"""Longer than a child is given to end in. Who asks again after that is heard again."""
_ANSWER_SECONDS: Final = 0.3
"""A command that ends sooner after Ctrl-C needs no line that says what it does."""
_SECOND_PRESS_SECONDS: Final = 1.0
"""What comes sooner is the first press, sent on by a shell or a launcher, or a key that is held."""
_ENDING: Final = "Interrupted: ending what runs. Ctrl-C again, after a second, ends at once."
_FIRST_OR_NO_RANK: Final = ("0", "-1")
"""Of LOCAL_RANK; -1 is what libraries write where there are no ranks."""
_SOON_SECONDS: Final = 0.01
"""At once would be within the hook, which can only print it too."""


class AskedToEnd(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: whoever tidies up after Ctrl-C does so after these. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def as_error(interrupt: KeyboardInterrupt) -> Interrupted:
    """The sentence and the exit code of an interruption."""
    if isinstance(interrupt, AskedToEnd):
        return _REQUESTS[interrupt.number](f"ended by {signal.Signals(interrupt.number).name}")
    return Interrupted("interrupted")


class _Heeding:
    """The handler of the process. An interrupt that Python could only print, in a finaliser say, comes again.

    Ctrl-C is answered by a line at once, wherever standard error leads by then; of a machine's ranks the first says it.
    A second one ends the process as it is, and the servers of its jobs end these.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.is_reported = False
        """Whether the sentence that ends the command is printed."""
        self._since: float | None = None
        self.number: int = signal.SIGINT
        self._print_unraisable = sys.unraisablehook

    @property
    def was_raised(self) -> bool:
        return self._since is not None

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        seconds = time.monotonic()
        if self.is_over:
            return
        interval = math.inf if self._since is None else seconds - self._since
        if number == signal.SIGINT and _SECOND_PRESS_SECONDS <= interval < math.inf:
            if not self.is_reported:
                self._write(f"mismatch-probe: {as_error(KeyboardInterrupt())}")
            end_at_once(Interrupted.exit_code)
        if interval < _PATIENCE_SECONDS:
            return
        self._since, self.number = seconds, number
        if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") in _FIRST_OR_NO_RANK:
            _thread.start_new_thread(self._answer, (seconds,))
        raise _interruption(number)

    def _answer(self, since: float) -> None:
        """Not by a `threading.Thread`, whose lock the interrupted code may hold."""
        time.sleep(_ANSWER_SECONDS)
        if self._since == since and not (self.is_over or self.is_reported):
            self._write(_ENDING)

    def _write(self, line: str) -> None:
        """Over a line that is redrawn there. Not by a stream, which the interrupted code may be writing to."""
        begin = "\r\x1b[2K" if os.isatty(_ERRORS) else ""
        with suppress(OSError):
            os.write(_ERRORS, f"{begin}{line}\n".encode())

    def come_again(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._since = None
            timer = threading.Timer(_SOON_SECONDS, _thread.interrupt_main, (self.number,))
            timer.daemon = True
            timer.start()
        else:
            self._print_unraisable(unraisable)


_heeding = _Heeding()


def heed_interrupts() -> None:
    """Call once, at the start of the process; one that was started deaf, as a shell's background jobs are, stays so.

    So does one that `nohup` started.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _heeding.interrupt)
        sys.unraisablehook = _heeding.come_again
    for number in _REQUESTS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _heeding.interrupt)


def ignore_interrupts() -> None:
    """From here the process only ends: what Python does then must not be interrupted."""
    _heeding.is_over = True
    for number in (signal.SIGINT, *_REQUESTS):
        signal.signal(number, signal.SIG_IGN)


def expect_report() -> None:
    """The sentence that ends the command follows: none comes behind it."""
    _heeding.is_reported = True


def interruption_that_came() -> KeyboardInterrupt:
    """The last one, for where typer has made an exit code of it."""
    return _interruption(_heeding.number)


def was_interrupted() -> bool:
    """Whether one was raised in this process: a library that it reached may have made another error of it."""
    return _heeding.was_raised


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """An interruption stays one, whatever the library that it reaches makes of it, as pydantic does while it loads.

    Raises:
        KeyboardInterrupt: an error came of one.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_REQUESTS)}
    earlier_handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        earlier_handlers[number](number, frame)

    for number in earlier_handlers:
        signal.signal(number, interrupt)
    try:
        yield
    except Exception as error:
        if came:
            raise _interruption(came[0]) from error
        raise
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _interruption(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else AskedToEnd(number)


_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_IF_CLOSED: Final = {_INPUT: os.O_RDONLY, _OUTPUT: os.O_RDONLY, _ERRORS: os.O_WRONLY}
"""How the null device takes the place of a stream that was closed before the start: what is written to standard output
is refused, as it was before; what is written for people is lost."""


def keep_standard_streams() -> None:
    """Call once, at the start of the process.

    Messages that nobody reads any more are dropped, and the work goes on. Standard output carries the answer: a
    reader that goes away, as `head` does, has read enough; a file that does not take it is a StorageError. A stream
    that is closed gets a descriptor: otherwise the next file to be opened would get its number, and a library's
    messages would go into that file.
    """
    for descriptor, flags in _IF_CLOSED.items():
        try:
            os.fstat(descriptor)
        except OSError:
            null_device = os.open(os.devnull, flags)
            if null_device != descriptor:
                os.dup2(null_device, descriptor)
                os.close(null_device)
            os.set_inheritable(descriptor, True)
    sys.stdout = _text(_WhatWasAskedFor(_OUTPUT, "w", closefd=False), sys.stdout)
    sys.stderr = for_people(_ERRORS, sys.stderr, closefd=False)


def output_is_open() -> bool:
    """Whether there was a standard output when the process started."""
    try:
        return fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except (OSError, ValueError):  # no descriptor of this process
        return True


def end_at_once(code: int) -> NoReturn:
    """End the process with what was written so far, and without what libraries do at an end, which can take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, StorageError, RuntimeError):  # the last where a handler came within a write
            stream.flush()
    os._exit(code)


def for_people(descriptor: int, like: TextIO | None = None, *, closefd: bool = True) -> TextIO:
    """A text stream on `descriptor`, in the encoding of `like`, that drops what nobody can read any more."""
    return _text(_ForPeople(descriptor, "w", closefd=closefd), like, line_buffering=True)


class _ForPeople(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            _drop_from_now_on(self.fileno())
            return len(data)


class _WhatWasAskedFor(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _drop_from_now_on(self.fileno())
            return len(data)
        except OSError as error:
            _drop_from_now_on(self.fileno())
            raise StorageError(
                f"what was asked for on standard output could not be written to its end: {error.strerror}; give it a "
                "file that takes it"
            ) from error


def _text(raw: io.FileIO, like: TextIO | None, *, line_buffering: bool = False) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding if like is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
    )


def _drop_from_now_on(descriptor: int) -> None:
    """What is still in buffers goes nowhere too: where the last flush fails, Python ends with a code of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
