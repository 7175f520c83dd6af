"""Whether a step's batch is the one of the steps before, by its metrics."""

import math
from collections.abc import Iterable
from typing import Final

from mismatch_probe.guards.rules.base import Values

REPEATS: Final = "response/repeats"
_LOG_PROB: Final = "mismatch/logprob_mu"
_ALSO: Final = ("response/length_mean", "response/length_max")
_SAME: Final = 1e-9
"""Relative difference of two sums of the same numbers in another order."""


def repeats(metrics: Values, earlier: Iterable[Values]) -> dict[str, float]:
    """How many steps right before this one had its very responses; nothing where no log-prob of mu is recorded.

    metrics: of the step; earlier: of the steps before it, the newest first. Responses that were sampled anew have
    another mean log-prob of mu. One that is exactly 0, or no number, tells nothing; and a batch in which all responses
    to each prompt earned the same is none that is learnt from, so it may come again.
    """
    if _LOG_PROB not in metrics:
        return {}
    count = 0
    if _tells(metrics):
        for values in earlier:
            if not _is_same(metrics, values):
                break
            count += 1
    return {REPEATS: float(count)}


def _tells(metrics: Values) -> bool:
    log_prob = metrics[_LOG_PROB]
    return math.isfinite(log_prob) and log_prob != 0 and metrics.get("reward/flat_groups_share") != 1


def _is_same(metrics: Values, other: Values) -> bool:
    return math.isclose(metrics[_LOG_PROB], other.get(_LOG_PROB, math.nan), rel_tol=_SAME) and all(
        metrics.get(name) == other.get(name) for name in _ALSO
    )
