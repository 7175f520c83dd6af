"""What a diagnosis says, and the steps that it looks back on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.rules.base import Values


class EndCause(StrEnum):
    """What can end a run; tried in this order, because the earlier ones bring on the later ones' signs."""

    NO_TOKENS = "no_tokens"
    COPIED_SIDE = "copied_side"
    REWARD_SCALE = "reward_scale"
    FP16_DEAD = "fp16_dead"
    MISSING_LOGPROBS = "missing_logprobs"
    REWARD_LATE = "reward_late"
    REWARD_NAN = "reward_nan"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    TRUNCATED = "truncated"
    NO_END = "no_end"
    REWARD_UNREPEATED = "reward_unrepeated"
    BATCH_REPEATED = "batch_repeated"
    OTHER_BASE = "other_base"
    MISPAIRED = "mispaired"
    LABEL_OFFSET = "label_offset"
    STALE_SYNC = "stale_sync"
    PARTIAL_SYNC = "partial_sync"
    TEMPERATURE = "temperature"
    TOKENS_REPLACED = "tokens_replaced"
    LEARNING_RATE = "learning_rate"
    COMPUTATION = "computation"
    ENGINE_WEIGHTS = "engine_weights"
    OTHER_SCORES = "other_scores"
    GRADIENT_SCALE = "gradient_scale"
    REWARD_CHANGED = "reward_changed"
    ENTROPY_COLLAPSE = "entropy_collapse"
    FLAT = "flat"
    PRECISION_DRIFT = "precision_drift"
    NARROW_BAND = "narrow_band"
    HARMFUL_UPDATES = "harmful_updates"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Diagnosis:
    cause: EndCause
    sentence: str
    advice: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.advice))


@dataclass(frozen=True)
class Window:
    """The steps looked back on, oldest first, and what fired in them."""

    history: Mapping[int, Values]
    events: Sequence[GuardEvent]

    def series(self, name: str) -> list[float]:
        return [values[name] for values in self.history.values() if name in values]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.series(name) if math.isfinite(value)]

    def before(self, step: int) -> "Window":
        """The steps older than that one."""
        return Window({past: values for past, values in self.history.items() if past < step}, ())

    def last(self, name: str) -> float | None:
        """The newest step's value; None where it has none."""
        return self.history[max(self.history)].get(name) if self.history else None
