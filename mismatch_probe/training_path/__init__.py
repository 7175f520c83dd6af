"""The training path: pi in each precision that trainers use, and the reference both sides are held against."""

from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.products import CpuProducts
from mismatch_probe.training_path.scorer import Scorer
from mismatch_probe.training_path.weight_cast import WeightCast

__all__ = ["CpuProducts", "Scorer", "WeightCast", "plan_batches"]
