"""What a verdict is reached from: the numbers of one pair, the FP32 pair beside it, and what really ran."""

from dataclasses import dataclass

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Counts
from mismatch_probe.stats.results import Blame, Estimate, LengthLaw


@dataclass(frozen=True)
class Case:
    """One pair. `exact_pair` holds the metrics of FP32 against FP32 in the same run, None where it was not run.

    `applied_train` and `applied_infer` were read back from the loaded model and the running engine.
    """

    train_dtype: Dtype
    infer_dtype: Dtype
    applied_train: str | None
    applied_infer: str | None
    counts: Counts
    metrics: dict[str, Estimate]
    length: LengthLaw | None
    blame: Blame | None
    exact_pair: dict[str, Estimate] | None

    @property
    def is_exact_pair(self) -> bool:
        return self.train_dtype in ("fp32", "fp64") and self.infer_dtype in ("fp32", "fp64")
