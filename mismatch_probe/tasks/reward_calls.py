"""Calls of a reward function side by side, each within a limit of time."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class RewardLimits:
    """How reward functions are called."""

    workers: int
    """Calls at a time, each in a thread of its own; with 1 they run one after another in the caller's thread, where
    signals work and no limit can be kept.
    """
    seconds: float
    """What a call may take."""


SEQUENTIAL: Final = RewardLimits(workers=1, seconds=float("inf"))


@dataclass
class Call(Generic[Value]):
    """One call of a reward function."""

    work: Callable[[], Value]
    start: float | None = None
    has_ended: bool = False
    is_late: bool = False
    """Whether it took longer than it may; its result is not waited for."""
    value: Value | None = None
    error: BaseException | None = None

    def make(self) -> None:
        try:
            self.value = self.work()
        except BaseException as error:  # noqa: BLE001 - raised again where the calls are waited for
            self.error = error


def make_calls(works: Sequence[Callable[[], Value]], limits: RewardLimits) -> list[Call[Value]]:
    """Every call, ended or late. The first error ends them all; threads that are late are abandoned."""
    calls = [Call(work) for work in works]
    if limits.workers == 1:
        for call in calls:
            call.value, call.has_ended = call.work(), True
        return calls
    pool = _Workers(calls, limits.seconds)
    for _ in range(min(limits.workers, len(calls))):
        pool.start_thread()
    pool.wait()
    return calls


class _Workers(Generic[Value]):
    """Daemon threads that take the next call each; one that is late is replaced."""

    def __init__(self, calls: Sequence[Call[Value]], seconds: float) -> None:
        self._calls = calls
        self._pending = deque(calls)
        self._seconds = seconds
        self._news = threading.Condition()

    def start_thread(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def wait(self) -> None:
        with self._news:
            while True:
                error = next((call.error for call in self._calls if call.has_ended and call.error is not None), None)
                if error is not None:
                    self._pending.clear()
                    raise error
                seconds = self._until_the_next_is_late()
                if all(call.has_ended or call.is_late for call in self._calls):
                    return
                self._news.wait(seconds)

    def _until_the_next_is_late(self) -> float:
        """Seconds until then; calls that are late by now are marked."""
        present = time.monotonic()
        seconds = [self._seconds]
        for call in self._calls:
            if call.start is None or call.has_ended or call.is_late:
                continue
            seconds.append(call.start + self._seconds - present)
            if seconds[-1] <= 0:
                call.is_late = True
                self.start_thread()
        return max(0.0, min(seconds))

    def _work(self) -> None:
        while True:
            with self._news:
                if not self._pending:
                    return
                call = self._pending.popleft()
                call.start = time.monotonic()
            call.make()
            with self._news:
                if call.is_late:
                    return
                call.has_ended = True
                self._news.notify()
