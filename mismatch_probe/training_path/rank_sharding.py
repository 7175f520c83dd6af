"""The part of a model that each rank holds: the request to transformers, and the checks of the result.

A short pass of the same model in one process is the standard of the last check.
"""

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.provenance.checkpoint import num_parameters
from mismatch_probe.training_path import rank_group
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.memory import free_memory
from mismatch_probe.training_path.observation import short_pass_ids

_DIVIDED: Final = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "numbers in an MLP",
    "moe_intermediate_size": "numbers in an expert",
    "vocab_size": "tokens in the vocabulary",
}
"""The sizes that tensor parallelism divides among ranks, by their names in configs."""
_DIVIDING: Final = ("colwise", "rowwise")
"""Parts of the names of the styles of a plan that divide a weight."""


def require_group(settings: TrainingPathSettings) -> None:
    """
    Raises:
        UsageError: the settings ask for ranks, and this process is not one of so many.
    """
    if settings.num_ranks is not None and settings.num_ranks != rank_group.size():
        raise UsageError(
            f"the training path is to run over {settings.num_ranks} ranks, and this command runs it on "
            f"{rank_group.size()}; use `compare`, or leave ranks and tensor_parallel unset"
        )


def require_gpus(device: torch.device, ranks_here: int) -> None:
    """
    Raises:
        UsageError: ranks on this machine are to compute on GPUs, and there is not one for each.
    """
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and ranks_here > gpus:
        raise UsageError(
            f"{ranks_here} ranks on this machine take a GPU each, and PyTorch sees {gpus}; give as many ranks as GPUs "
            "(--train-ranks, torchrun's --nproc-per-node), or --device cpu"
        )


def require_divisible(folder: Path, config: PreTrainedConfig, tensor_parallel: int) -> None:
    """
    Raises:
        UsageError: the model cannot be divided by so many ranks in each product.
    """
    if tensor_parallel == 1:
        return
    text = config.get_text_config()
    for name, what in _DIVIDED.items():
        number = getattr(text, name, None)
        if isinstance(number, int) and number % tensor_parallel:
            raise UsageError(
                f"{folder} has {number} {what} ({name}), which tensor_parallel = {tensor_parallel} does not divide; "
                "give a number that does, or ranks without tensor_parallel (FSDP2), which divides any model"
            )
    if not text.base_model_tp_plan:
        raise UsageError(
            f"transformers {transformers.__version__} has no tensor-parallel plan for {text.model_type} models; give "
            "ranks without tensor_parallel (FSDP2)"
        )


def loading_arguments(config: PreTrainedConfig, settings: TrainingPathSettings) -> dict[str, Any]:
    """The arguments of `from_pretrained` with which each rank reads only its own part; none where it reads all.

    Raises:
        EngineError: this version of transformers has no such arguments.
    """
    ranks, degree = settings.num_ranks or 1, settings.tensor_parallel
    if ranks == 1 or is_sharded_after_loading(config, settings):
        return {}
    config_class = getattr(transformers, "DistributedConfig", None)
    if config_class is not None and {"fsdp_size", "tp_size"} <= config_class.__dataclass_fields__.keys():
        return {"distributed_config": config_class(fsdp_size=ranks // degree, tp_size=degree)}
    if ranks == degree:
        return {"tp_plan": "auto", "tp_size": degree}
    raise EngineError(
        f"transformers {transformers.__version__} cannot shard a model over ranks by FSDP2 as it loads it; upgrade "
        "transformers, or set training.precision = fsdp, or tensor_parallel to the number of ranks"
    )


def is_sharded_after_loading(config: PreTrainedConfig, settings: TrainingPathSettings) -> bool:
    """Whether each rank first reads the whole model into the host's memory.

    This holds for precision = fsdp, as trainers load it, since transformers does not take its policy, and for
    architectures without a plan.
    """
    if settings.num_ranks is None or settings.tensor_parallel > 1:
        return False
    has_plan = bool(getattr(config.get_text_config(), "base_model_fsdp_plan", None))
    return settings.precision == "fsdp" or (settings.num_ranks > 1 and not has_plan)


def require_sharded(model: PreTrainedModel, settings: TrainingPathSettings) -> None:
    """Require that each rank holds only its part: a version that ignores the arguments would load every weight.

    Raises:
        EngineError: a rank holds all of a weight that is to be divided.
    """
    ranks = settings.num_ranks or 1
    if ranks == 1:
        return
    kind, share = ("FSDP2", ranks) if settings.tensor_parallel == 1 else ("tensor parallelism", ranks)
    weights = list(_divided_weights(model, settings.tensor_parallel))
    whole_names = [name for name, weight in weights if not isinstance(weight, DTensor)]
    num_local = sum(_local_weight(weight).numel() for _, weight in weights)
    total = sum(weight.numel() for _, weight in weights)
    if whole_names or not weights or num_local * share > total * (1 + _UNEVEN):
        example = f", such as {whole_names[0]}" if whole_names else ""
        raise EngineError(
            f"transformers {transformers.__version__} was asked for {kind} over {ranks} ranks, and each rank holds "
            f"whole weights all the same{example}; upgrade transformers, or leave ranks and tensor_parallel unset"
        )


def keep_own_module(model: PreTrainedModel) -> None:
    """Set the module of the class that FSDP2 derives from the model's class to the module of that class.

    transformers reads that file to learn whether attention and experts can be exchanged.
    """
    if isinstance(model, FSDPModule):
        sharded_class, _, own, *_ = type(model).__mro__
        sharded_class.__module__ = own.__module__


_UNEVEN: Final = 0.5
"""A rank's part may exceed its share by so much: uneven weights are padded, and tiny models hardly divide."""


def held_share(model: PreTrainedModel) -> float:
    """The share of the model's weights that this rank holds; before a forward pass, after which FSDP keeps some."""
    weights = list(model.parameters())
    return sum(_local_weight(weight).numel() for weight in weights) / max(1, sum(weight.numel() for weight in weights))


def _divided_weights(model: PreTrainedModel, tensor_parallel: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that ranks divide: all under FSDP2, under tensor parallelism those in the architecture's plan.

    Norms and routers are undivided, and so is all attention of DeepSeek V3, whose plan has MLPs and experts alone.
    """
    names = {name for name, style in model.tp_plan.items() if any(kind in style for kind in _DIVIDING)}
    for name, weight in model.named_parameters():
        generic = re.sub(r"\.\d+(?=\.)", ".*", name)
        if tensor_parallel == 1 or (".layers." in name and names & {generic, generic.rpartition(".")[0]}):
            yield name, weight


def _local_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


_TOKENS: Final = 32
_MOST_OF_MEMORY: Final = 0.4
_LARGEST_16_BIT: Final = 0.5
_LARGEST_FP32: Final = 1e-3
"""The largest difference, relative to the logits; wrong weights differ by about 1. Rounding that changes the choice of
experts can differ by a third in 16 bits."""

Load = Callable[[TrainingPathSettings], tuple[PreTrainedModel, Arithmetic]]


@dataclass(frozen=True)
class AgainstWhole:
    """The comparison of a model that ranks hold with the same model in one process."""

    difference: float | None
    """The root mean square of the logits' difference, relative to that of the logits; None where not measured."""
    why_not: str | None = None
    """Why it was not measured."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WholePass:
    """Logits [S, V] of the complete model on the first rank, where it fitted in memory; None on the other ranks."""

    logits_SV: torch.Tensor | None
    why_not: str | None

    def compare(self, model: PreTrainedModel, dtype: Dtype, settings: TrainingPathSettings) -> AgainstWhole:
        """Run the same tokens through the model over ranks.

        Raises:
            EngineError: its logits are not as wide as its vocabulary, or differ from those of the complete model.
        """
        with rank_group.lost_ranks_named():
            logits_SV = _short_logits(model)
        embeddings: Any = model.get_input_embeddings()
        if logits_SV.shape[-1] != embeddings.weight.shape[0]:
            raise EngineError(
                f"over {rank_group.size()} ranks {type(model).__name__} gives {logits_SV.shape[-1]} "
                f"logits for a vocabulary of {embeddings.weight.shape[0]}; leave ranks and tensor_parallel unset, or "
                "upgrade transformers"
            )
        comparison = AgainstWhole(None, self.why_not)
        if self.logits_SV is not None:
            comparison = AgainstWhole(_relative_difference_of(logits_SV, self.logits_SV))
        comparison = rank_group.from_first(comparison)
        largest = _LARGEST_16_BIT if dtype.rounds_coarsely else _LARGEST_FP32
        if comparison.difference is not None and not comparison.difference <= largest:
            raise EngineError(
                f"{type(model).__name__} over {rank_group.size()} ranks, {settings.tensor_parallel} to a product, "
                f"gives other logits than held by one process: they differ by {comparison.difference:.2g} of their "
                "size; leave ranks and tensor_parallel unset, or upgrade transformers"
            )
        return comparison


def whole_pass(
    folder: Path, dtype: Dtype, settings: TrainingPathSettings, device: torch.device, load: Load
) -> WholePass | None:
    """The first rank's pass before the model is divided; None where it is not to run.

    Its size is estimated in FP32, in which a model of fewer bits may pass through memory, or in FP64.
    """
    if settings.num_ranks is None:
        return None
    if rank_group.rank() != 0:
        return WholePass(None, None)
    precision = "weights" if settings.precision == "fsdp" else settings.precision
    one_rank = settings.model_copy(update={"ranks": None, "tensor_parallel": 1, "precision": precision})
    num_bytes, free = num_parameters(folder) * max(dtype.num_bytes, Dtype.FP32.num_bytes), free_memory(device)
    if num_bytes > _MOST_OF_MEMORY * free:
        gigabytes = f"{num_bytes / 1e9:.0f} of {free / 1e9:.0f} GB"
        return WholePass(None, f"the whole model may take {gigabytes} that are free on the first rank")
    model, arithmetic = load(one_rank)
    with arithmetic.active():
        logits_SV = _short_logits(model)
    del model
    gc.collect()
    return WholePass(logits_SV, None)


def _short_logits(model: PreTrainedModel) -> torch.Tensor:
    ids = short_pass_ids(model, _TOKENS)
    logits_SV: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return logits_SV


def _relative_difference_of(logits_SV: torch.Tensor, whole_SV: torch.Tensor) -> float:
    return float((logits_SV - whole_SV).square().mean().sqrt() / whole_SV.square().mean().sqrt())
