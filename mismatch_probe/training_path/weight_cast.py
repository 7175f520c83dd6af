"""What rounding a checkpoint's weights to a format changes, read from its files a tensor at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.adapter import WEIGHTS as ADAPTER
from mismatch_probe.provenance.checkpoint import weight_files
from mismatch_probe.provenance.quantization import stored_quantization
from mismatch_probe.training_path.arithmetic import torch_dtype


@dataclass(frozen=True)
class WeightCast:
    """`changed_share` of the weights are not exact in `dtype`; errors are absolute and exclude overflows.

    `num_overflowed` weights become infinite, `num_flushed` non-zero ones become zero.
    """

    dtype: Dtype
    num_weights: int
    num_changed: int
    num_overflowed: int
    num_flushed: int
    max_abs_error: float

    @property
    def is_exact(self) -> bool:
        return self.num_changed == 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "changed_share": self.num_changed / max(self.num_weights, 1)}


def measure_weight_cast(weights: Iterable[torch.Tensor], dtype: Dtype) -> WeightCast:
    """Compare each floating-point weight with its value after rounding to `dtype`, to nearest even."""
    target = torch_dtype(dtype)
    num_weights = num_changed = num_overflowed = num_flushed = 0
    max_abs_error = 0.0
    for weight in weights:
        if not weight.is_floating_point():
            continue
        num_weights += weight.numel()
        if weight.dtype.itemsize == 1:  # PyTorch promotes no 8-bit format
            weight = weight.float()
        if torch.promote_types(weight.dtype, target) == target:
            continue
        rounded = weight.to(target).to(weight.dtype)
        changed = (rounded != weight) & ~weight.isnan()
        if not changed.any():
            continue
        before, after = weight[changed].double(), rounded[changed].double()
        overflowed = after.isinf() & before.isfinite()
        num_changed += before.numel()
        num_overflowed += int(overflowed.sum())
        num_flushed += int((after == 0).sum())
        kept = (after - before)[~overflowed].abs()
        max_abs_error = max(max_abs_error, float(kept.max()) if kept.numel() else 0.0)
    return WeightCast(dtype, num_weights, num_changed, num_overflowed, num_flushed, max_abs_error)


def held_weights(folder: Path, settings: TrainingPathSettings) -> Iterator[torch.Tensor] | None:
    """The tensors that a training path brings to its dtype, or None where no file holds them.

    They are the checkpoint's and those of an adapter beside them; of a merged one only the sums are, and of a quantised
    checkpoint only the products with their scales.

    Raises:
        UsageError: the checkpoint has no intact safetensors files.
    """
    if settings.adapter_merged or stored_quantization(folder) is not None:
        return None
    adapter = [] if settings.adapter is None else [Path(settings.adapter) / ADAPTER]
    return stored_tensors([*weight_files(folder), *adapter])


def stored_tensors(files: Iterable[Path]) -> Iterator[torch.Tensor]:
    """Every tensor of some safetensors files, one at a time."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                yield tensors.get_tensor(key)
