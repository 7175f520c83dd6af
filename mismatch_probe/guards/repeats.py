"""Whether a step's batch is one of the steps before, by its metrics."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from mismatch_probe.guards.rules.base import Values

REPEATS: Final = "response/repeats"
RETURNED: Final = "response/returned_after"
NOT_NEW: Final = "response/steps_not_new"
NEW: Final = dict.fromkeys((REPEATS, RETURNED, NOT_NEW), 0.0)
"""The metrics of a batch that was never seen."""
REMEMBERED: Final = 64
"""Batches."""

_LOG_PROB: Final = "mismatch/logprob_mu"
_LENGTHS: Final = ("response/length_mean", "response/length_max")
_SAME: Final = 1e-9
"""Relative difference of two sums of the same numbers in another order."""
_UNLIKELY_NATS: Final = 12.0
"""Mean -log mu of a response: shorter answers of weights that stand still may be drawn again, in another order."""

Digest = tuple[float, ...]
"""The mean log-prob of mu and the lengths, which responses that were sampled anew do not share."""


@dataclass
class SeenBatches:
    """digests: of the last batches, the newest last; None of a step that gave none. not_new: steps in a row, the last
    one included, whose batch was one of those before.
    """

    digests: deque[Digest | None] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    not_new: int = 0

    def take(self, metrics: Values) -> dict[str, float]:
        """Takes a step in. How many steps right before it had its very responses; how many steps ago a batch with them
        came last, 0 where none did; and `not_new`. Nothing where no log-prob of mu is recorded.

        A mean that is exactly 0, or no number, tells nothing; and a batch in which all responses to each prompt earned
        the same is none that is learnt from, so it may come again. Of likely responses only the step before is looked
        at.
        """
        if _LOG_PROB not in metrics:
            self.digests.append(None)
            return {}
        digest = _digest(metrics)
        earlier = list(reversed(self.digests))
        self.digests.append(digest)
        if digest is None or metrics.get("reward/flat_groups_share") == 1:
            self.not_new = 0
            return dict(NEW)
        same = [_is_same(digest, other) for other in earlier]
        in_a_row = same.index(False) if False in same else len(same)
        if not _is_unlikely(metrics):
            same = same[:1]
        returned_after = same.index(True) + 1 if True in same else 0
        self.not_new = self.not_new + 1 if returned_after else 0
        return {REPEATS: float(in_a_row), RETURNED: float(returned_after), NOT_NEW: float(self.not_new)}

    def state(self) -> dict[str, Any]:
        """JSON values."""
        digests = [None if digest is None else list(digest) for digest in self.digests]
        return {"digests": digests, "not_new": self.not_new}

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None, history: Iterable[Values]) -> Self:
        """history: the metrics of the last steps, which stand for a state of the version before, that has none.

        Raises:
            ValueError: a batch is not described as here, or the count is no whole number.
        """
        if state is None:
            return cls(deque(map(_digest, history), maxlen=REMEMBERED))
        digests = [None if digest is None else tuple(map(float, digest)) for digest in state["digests"]]
        if any(digest is not None and len(digest) != 1 + len(_LENGTHS) for digest in digests):
            raise ValueError("a batch of a state is not described by its log-prob and lengths")
        if type(state["not_new"]) is not int:
            raise ValueError("a count of steps without a new batch is no whole number")
        return cls(deque(digests, maxlen=REMEMBERED), state["not_new"])


def _digest(metrics: Values) -> Digest | None:
    log_prob = metrics.get(_LOG_PROB, math.nan)
    if not math.isfinite(log_prob) or log_prob == 0:
        return None
    return (log_prob, *(metrics.get(name, 0.0) for name in _LENGTHS))


def _is_same(digest: Digest, other: Digest | None) -> bool:
    return other is not None and math.isclose(digest[0], other[0], rel_tol=_SAME) and digest[1:] == other[1:]


def _is_unlikely(metrics: Values) -> bool:
    return -metrics[_LOG_PROB] * metrics.get(_LENGTHS[0], 0.0) > _UNLIKELY_NATS
