"""What a rank that holds a part of a model needs for its weights: the part, and what it gathers while it computes."""

from typing import Final

from mismatch_probe.compare.cost.architecture import Architecture

_LAYERS_GATHERED: Final = 2
"""FSDP2 gathers the next layer while one computes."""


def rank_weight_bytes(architecture: Architecture, itemsize: int, *, ranks: int, tensor_parallel: int) -> float:
    """Bytes at most: a rank's part of every weight; under FSDP2 also two layers and what no layer holds, of which the
    head stays gathered. Ranks that divide products gather only each its own part of those.
    """
    part = architecture.parameters / ranks
    if ranks > tensor_parallel:
        gathered = architecture.outside_parameters + _LAYERS_GATHERED * architecture.layer_parameters
        part += gathered / tensor_parallel
    return part * itemsize
