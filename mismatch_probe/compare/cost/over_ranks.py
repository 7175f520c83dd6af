"""What a rank that holds a part of a model needs and does: its memory for weights, its passes, what it is sent."""

from math import ceil
from typing import Final

from mismatch_probe.compare.cost.architecture import Architecture
from mismatch_probe.compare.cost.rates import Work

_LAYERS_GATHERED: Final = 2
"""FSDP2 gathers the next layer while one computes."""
_SUMS_OF_A_LAYER: Final = 2
"""Behind attention and behind the MLP."""


def rank_weight_bytes(architecture: Architecture, itemsize: int, *, ranks: int, tensor_parallel: int) -> float:
    """Bytes at most: a rank's part of every weight; under FSDP2 also two layers and what no layer holds, of which the
    head stays gathered. Ranks that divide products gather only each its own part of those.
    """
    part = architecture.parameters / ranks
    if ranks > tensor_parallel:
        gathered = architecture.outside_parameters + _LAYERS_GATHERED * architecture.layer_parameters
        part += gathered / tensor_parallel
    return part * itemsize


def work_of_rank(work: Work, passes: float, *, ranks: int, tensor_parallel: int) -> Work:
    """What a rank that has a device of its own does of a stage's passes: they are dealt out, whole, to groups of ranks
    that divide products. Where there are fewer passes than groups, some compute nothing of their own.
    """
    groups = ranks // tensor_parallel
    rounds = ceil(passes / groups)
    return work.times(min(1.0, rounds / passes)).shared_by(tensor_parallel) if passes else work


def received_bytes(
    architecture: Architecture, itemsize: int, passes: float, tokens: float, *, ranks: int, tensor_parallel: int
) -> float:
    """What each rank is sent by the others: under FSDP2 all that its group lacks of the weights, for every pass; where
    ranks divide products, twice a layer the others' sums for its tokens, in a ring.
    """
    groups = ranks // tensor_parallel
    weights = architecture.parameters / tensor_parallel * (1 - 1 / groups) * ceil(passes / groups)
    in_ring = 2 * (tensor_parallel - 1) / tensor_parallel
    sums = _SUMS_OF_A_LAYER * architecture.num_layers * architecture.hidden_size * tokens / groups * in_ring
    return (weights + sums) * itemsize
