"""Seconds of a step by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_DONE_TO_TOKENS: Final = {"sample": "sampled", "score": "scored", "learn": "learned"}
_SHORTEST_SECONDS: Final = 1e-9


class Clock:
    """Adds up wall-clock seconds under names."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begun

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Count seconds of one phase under another."""
        self.seconds[phase] -= seconds
        self.seconds[to] += seconds

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """`time/PHASE_seconds`, `time/step_seconds`, and response tokens a second: of the step, and of each phase that
        works on all of them.
        """
        whole = time.perf_counter() - self._start
        times = {f"time/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        paces = {
            f"time/{done}_tokens_per_second": num_tokens / max(self.seconds[phase], _SHORTEST_SECONDS)
            for phase, done in _DONE_TO_TOKENS.items()
        }
        return times | paces | {"time/step_seconds": whole, "time/tokens_per_second": num_tokens / whole}
