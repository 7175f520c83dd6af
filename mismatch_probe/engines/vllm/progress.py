"""How many requests of a call are done, through the progress bar that vLLM would draw."""

from collections.abc import Callable, Iterable
from io import StringIO
from typing import Any, Final

from tqdm import tqdm  # type: ignore[import-untyped]

_NEVER: Final = 1e9


class FinishedRequests(tqdm):  # type: ignore[misc]
    """Given to vLLM as its `tqdm`: draws nothing and tells `report` the requests done, and all of them."""

    monitor_interval = 0

    def __init__(self, report: Callable[[int, int], None], requests: Iterable[Any] | None = None, **settings: Any):
        super().__init__(requests, **{**settings, "file": StringIO(), "mininterval": _NEVER})
        self._report = report

    def update(self, n: float | None = 1) -> bool | None:
        drawn: bool | None = super().update(n)
        self._report(int(self.n), int(self.total))
        return drawn
