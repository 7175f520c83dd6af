"""Ctrl-C stays Ctrl-C: one ends the program, and those after it do not disturb how it ends."""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_PATIENCE_SECONDS: Final = 15.0
"""Longer than a child is given to end in. Who presses again after that is heard again."""
_SOON_SECONDS: Final = 0.01
"""At once would be within the hook, which can only print it too."""


class _Heeding:
    """The handler of the process. An interrupt that Python could only print, in a finaliser say, comes again."""

    def __init__(self) -> None:
        self.over = False
        self._since: float | None = None
        self._print_unraisable = sys.unraisablehook

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.over or (self._since is not None and now - self._since < _PATIENCE_SECONDS):
            return
        self._since = now
        raise KeyboardInterrupt

    def come_again(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            self._since = None
            again = threading.Timer(_SOON_SECONDS, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            self._print_unraisable(unraisable)


_heeding = _Heeding()


def heed_interrupts() -> None:
    """Call once, at the start of the process; one that was started deaf, as a shell's background jobs are, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _heeding.interrupt)
        sys.unraisablehook = _heeding.come_again


def ignore_interrupts() -> None:
    """From here the process only ends: what Python does then must not be interrupted."""
    _heeding.over = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """An interruption stays one, whatever the library that it reaches makes of it, as pydantic does while it loads.

    Raises:
        KeyboardInterrupt: an error came of one.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
