"""Seconds of a step by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """`time/PHASE_seconds`, `time/step_seconds`, and response tokens a second of sampling and of the whole step."""
        whole = time.perf_counter() - self._start
        found = {f"time/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        return found | {
            "time/step_seconds": whole,
            "time/sampled_tokens_per_second": num_tokens / max(self.seconds["sample"], 1e-9),
            "time/tokens_per_second": num_tokens / whole,
        }
