"""How far a command is, in one line: redrawn on a terminal, elsewhere printed as a stage begins, and now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mismatch_probe.inert import plain
from mismatch_probe.notation import write_rough_seconds

LINE_EVERY_SECONDS: Final = 30.0
_REDRAWN_A_SECOND: Final = 4
_FEW_SECONDS: Final = 10.0
_WORTH_SAYING_SECONDS: Final = 3.0
"""A stage that takes longer is told how long it has been going on."""

Left = Callable[[], float | None]


class ProgressLine:
    """`stage 5 of 27, about 2 min left: score-fp32, 3 of 16 batches`; made by `progress_line`.

    left: the seconds that all stages still need; None while nothing tells.
    """

    def __init__(self, console: Console, left: Left, first: str) -> None:
        self._console = console
        self._left = left
        self._is_redrawn = is_redrawn(console)
        self._place, self._doing, self._detail = "", first, ""
        self._since = self._printed = time.monotonic()

    def begin(self, doing: str, number: int | None = None, of: int = 0, detail: str = "") -> None:
        """What is done from now on: the stage `number`, from 1, of so many, or something that has none."""
        self._place = "" if number is None else f"stage {number} of {of}"
        self._doing, self._detail = doing, detail
        self._since = time.monotonic()
        self._print()

    def at(self, doing: str, number: int, of: int, detail: str) -> None:
        """How far it is with what may be another stage by now."""
        if (self._doing, self._place) == (doing, f"stage {number} of {of}"):
            self.go_on(detail)
        else:
            self.begin(doing, number, of, detail)

    def go_on(self, detail: str) -> None:
        """How far it is with that."""
        self._detail = detail
        if time.monotonic() - self._printed >= LINE_EVERY_SECONDS:
            self._print()

    def say(self, sentence: str) -> None:
        """A sentence that stays, above the line."""
        self._console.print(plain(sentence), soft_wrap=True, highlight=False)

    def __str__(self) -> str:
        left = self._left() if self._place else None
        where = [self._place, "" if left is None else time_left(left)]
        place = ", ".join(word for word in where if word)
        doing = f"{self._doing}, {self._detail}" if self._detail else self._doing
        return f"{place}: {doing}" if place else doing

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._since
        going_on = f", {seconds:.0f} s" if seconds >= _WORTH_SAYING_SECONDS else ""
        return Text(plain(f"{self}{going_on}"), style="dim", no_wrap=True, overflow="ellipsis")

    def _print(self) -> None:
        self._printed = time.monotonic()
        if not self._is_redrawn:
            self.say(str(self))

    @contextmanager
    def _shown(self) -> Iterator[Self]:
        if not self._is_redrawn:
            yield self
            return
        with Live(
            self,
            console=self._console,
            refresh_per_second=_REDRAWN_A_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield self


def time_left(seconds: float) -> str:
    """How a line says how long it will take yet."""
    return "a few seconds left" if seconds < _FEW_SECONDS else f"about {write_rough_seconds(seconds)} left"


def is_redrawn(console: Console) -> bool:
    """Whether someone watches, and a line can be written over."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def progress_line(console: Console, left: Left = lambda: None, first: str = "") -> Iterator[ProgressLine]:
    """The line, for as long as the work goes on; nothing of it is left on a terminal.

    first: what a terminal shows until something begins.
    """
    with ProgressLine(console, left, first)._shown() as line:
        yield line
