"""What guards have changed since the run began; it is saved with every checkpoint."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, ClassVar, Self

from pydantic import ConfigDict

from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.actions import Action, ActionKind


@dataclass(frozen=True)
class Adjustments:
    """learning_rate_factor multiplies the schedule; correction replaces the objective's; responses with abs(S) beyond
    sequence_bound (nats) leave the loss; train_dtype and infer_dtype replace the settings'.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    learning_rate_factor: float = 1.0
    correction: str | None = None
    sequence_bound: float | None = None
    train_dtype: Dtype | None = None
    infer_dtype: Dtype | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_rate_raised(self, by: float) -> Self:
        """With a rate that was lowered multiplied by this, and never above the schedule."""
        return self if by == 1 else replace(self, learning_rate_factor=min(1.0, self.learning_rate_factor * by))

    def answering(self, action: Action, ratios: Sequence[float]) -> Self:
        """With what an action changes from now on; `ratios` are abs(S) of the step's responses, nats.

        A bound that would leave less than half of these in the loss is not tightened to, nor one of 0, which any later
        response that rounds otherwise would exceed.
        """
        match action.kind:
            case ActionKind.LOWER_LEARNING_RATE:
                assert action.factor is not None
                return replace(self, learning_rate_factor=self.learning_rate_factor * action.factor)
            case ActionKind.SWITCH_CORRECTION:
                return replace(self, correction=action.to)
            case ActionKind.TIGHTEN_SEQUENCES:
                assert action.factor is not None
                bound = action.factor * (max(ratios) if self.sequence_bound is None else self.sequence_bound)
                return replace(self, sequence_bound=bound) if 0 < bound < math.inf and median(ratios) <= bound else self
            case ActionKind.RAISE_PRECISION:
                in_fp32: dict[str, Any] = {f"{action.side}_dtype": Dtype.FP32}
                return replace(self, **in_fp32)
            case _:
                return self
