"""Which stages will hold one layer at a time, decided beforehand as the training path decides it when it loads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from mismatch_probe.compare.cost.rates import Calibration
from mismatch_probe.compare.cost.stage_work import hidden_bytes
from mismatch_probe.compare.cost.workload import Workload
from mismatch_probe.compare.stages import ScoreStage, Stage
from mismatch_probe.config.model import HIDDEN_SHARE
from mismatch_probe.notation import write_size

_HOST: Final = "cpu"


def stages_by_layer(stages: Sequence[Stage], workload: Workload, calibration: Calibration) -> dict[str, str]:
    """The stages of the reference that will hold one layer at a time, and why."""
    reference = workload.settings.reference
    layered = {}
    for stage in stages:
        side = stage.side
        if side.role != "ref" or side.num_ranks or side.training is None:
            continue
        if side.rounded_to is not None and side.rounded_to == workload.checkpoint_dtype:
            continue
        whole = side.training.adapter is not None or side.training.device_map is not None
        if whole and not reference.by_layer:
            continue
        device = calibration.rates_of("training", side.dtype).device
        needed = workload.architecture_of(side).parameters * side.dtype.num_bytes
        free = calibration.free_memory_bytes[device]
        if reference.holds_one_layer(needed, free):
            sizes = f"its weights in {side.dtype} take {write_size(needed)}, and {write_size(free)} are free ({device})"
            layered[stage.name] = "reference.by_layer asks for it" if reference.by_layer else sizes
    return layered


def with_stages_by_layer(workload: Workload, stages: Sequence[Stage], calibration: Calibration) -> Workload:
    """The workload that says which stages these are, and whether their hidden states are too many for memory."""
    workload = replace(workload, by_layer=frozenset(stages_by_layer(stages, workload, calibration)))
    on_disk = most_hidden_bytes(workload, stages) > HIDDEN_SHARE * calibration.free_memory_bytes[_HOST]
    return replace(workload, hidden_on_disk=on_disk)


def most_hidden_bytes(workload: Workload, stages: Sequence[Stage]) -> float:
    """Of the hidden states of one of these stages; they are written to disk, whether they are in memory too or not."""
    layered = [stage for stage in stages if isinstance(stage, ScoreStage) and stage.name in workload.by_layer]
    return max((hidden_bytes(stage, workload) for stage in layered), default=0.0)
