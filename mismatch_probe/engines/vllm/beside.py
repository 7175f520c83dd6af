"""Work in a thread that is no longer waited for once it is known to come to nothing."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """What blocks in a collective cannot be ended; where its other end never comes, the thread is left behind."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._outcomes: SimpleQueue[tuple[Result, None] | tuple[None, BaseException]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Have `result` raise this, if nothing is known before."""
        self._outcomes.put((None, error))

    def result(self, seconds: float | None = None) -> Result:
        """What the work gave, or raises what it raised.

        Raises:
            TimeoutError: neither within so many seconds.
        """
        try:
            result, error = self._outcomes.get(timeout=seconds)
        except Empty as error:
            raise TimeoutError(f"nothing within {seconds:g} s") from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._outcomes.put((self._work(), None))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._outcomes.put((None, error))
