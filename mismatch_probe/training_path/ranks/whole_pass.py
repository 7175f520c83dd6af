"""A short pass of the model held by one process, against which the same model over ranks is checked."""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError
from mismatch_probe.provenance.checkpoint import num_parameters
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.by_layer.free_memory import free_memory
from mismatch_probe.training_path.ranks import group
from mismatch_probe.training_path.short_pass import short_pass_ids

_TOKENS: Final = 32
_MOST_OF_MEMORY: Final = 0.4
_LARGEST_16_BIT: Final = 0.5
_LARGEST_FP32: Final = 1e-3
"""Of what wrong weights differ by, which is about the logits themselves. Rounding that turns an expert's choice can
come to a third of that in 16 bits."""

Load = Callable[[TrainingPathSettings], tuple[PreTrainedModel, Arithmetic]]


@dataclass(frozen=True)
class AgainstWhole:
    """difference: root mean square of the logits' difference, relative to that of the logits; None where not measured.

    why_not: why it was not.
    """

    difference: float | None
    why_not: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WholePass:
    """Logits [S, V] on the first rank, where there was room for the whole model; None on the others."""

    logits_SV: torch.Tensor | None
    why_not: str | None

    def compared(self, model: PreTrainedModel, dtype: Dtype, settings: TrainingPathSettings) -> AgainstWhole:
        """Run the same tokens through the model as ranks hold it.

        Raises:
            EngineError: its logits are not as wide as its vocabulary, or are other ones than the whole model's.
        """
        with group.lost_ranks_named():
            logits_SV = _logits(model)
        embeddings: Any = model.get_input_embeddings()
        if logits_SV.shape[-1] != embeddings.weight.shape[0]:
            raise EngineError(
                f"over {group.size()} ranks {type(model).__name__} gives {logits_SV.shape[-1]} logits for a vocabulary "
                f"of {embeddings.weight.shape[0]}; leave ranks and tensor_parallel unset, or upgrade transformers"
            )
        compared = AgainstWhole(None, self.why_not)
        if self.logits_SV is not None:
            compared = AgainstWhole(_relative(logits_SV, self.logits_SV))
        compared = group.from_first(compared)
        largest = _LARGEST_16_BIT if dtype.is_16_bit else _LARGEST_FP32
        if compared.difference is not None and not compared.difference <= largest:
            raise EngineError(
                f"{type(model).__name__} over {group.size()} ranks, {settings.tensor_parallel} to a product, gives "
                f"other logits than held by one process: they differ by {compared.difference:.2g} of their size; leave "
                "ranks and tensor_parallel unset, or upgrade transformers"
            )
        return compared


def whole_pass(
    folder: Path, dtype: Dtype, settings: TrainingPathSettings, device: torch.device, load: Load
) -> WholePass | None:
    """The first rank's pass before the model is shared out; None where it is not to be.

    Its weights are counted in FP32, in which a model of fewer bits may pass through memory, or in FP64.
    """
    if settings.num_ranks is None:
        return None
    if group.rank() != 0:
        return WholePass(None, None)
    precision = "weights" if settings.precision == "fsdp" else settings.precision
    whole = settings.model_copy(update={"ranks": None, "tensor_parallel": 1, "precision": precision})
    needed, free = num_parameters(folder) * max(dtype.num_bytes, Dtype.FP32.num_bytes), free_memory(device)
    if needed > _MOST_OF_MEMORY * free:
        gigabytes = f"{needed / 1e9:.0f} of {free / 1e9:.0f} GB"
        return WholePass(None, f"the whole model may take {gigabytes} that are free on the first rank")
    model, arithmetic = load(whole)
    with arithmetic.active():
        logits_SV = _logits(model)
    del model
    gc.collect()
    return WholePass(logits_SV, None)


def _logits(model: PreTrainedModel) -> torch.Tensor:
    ids = short_pass_ids(model, _TOKENS)
    logits_SV: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return logits_SV


def _relative(logits_SV: torch.Tensor, whole_SV: torch.Tensor) -> float:
    return float((logits_SV - whole_SV).square().mean().sqrt() / whole_SV.square().mean().sqrt())
