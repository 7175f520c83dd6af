"""What guards have changed since the run began; it is saved with every checkpoint."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from mismatch_probe.dtypes import Dtype


@dataclass(frozen=True)
class Adjustments:
    """learning_rate_factor multiplies the schedule; correction replaces the objective's; responses with abs(S) beyond
    sequence_bound (nats) leave the loss; train_dtype and infer_dtype replace the settings'.
    """

    learning_rate_factor: float = 1.0
    correction: str | None = None
    sequence_bound: float | None = None
    train_dtype: Dtype | None = None
    infer_dtype: Dtype | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)
