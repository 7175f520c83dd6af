"""The training path: pi in each precision that trainers use, and the reference that both sides are compared with."""

from mismatch_probe.training_path.arithmetic import CpuProducts
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.fit import WeightCast
from mismatch_probe.training_path.scorer import Scorer

__all__ = ["CpuProducts", "Scorer", "WeightCast", "plan_batches"]
