"""How much memory each process of a comparison needs, set against its device, and which stages hold one layer of it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Final

from pydantic import BaseModel, ConfigDict

from mismatch_probe.compare.cost.roofline import Calibration
from mismatch_probe.compare.cost.stage_work import (
    Workload,
    computes,
    engine_number,
    hidden_bytes,
    key_of,
    rank_weight_bytes,
)
from mismatch_probe.compare.plan import Plan, PlannedJob
from mismatch_probe.compare.stages import LONGEST_REPEATED, FloorStage, ScoreStage, Stage
from mismatch_probe.config.model import CPU_PASS_TOKENS, HIDDEN_SHARE, WEIGHTS_SHARE
from mismatch_probe.engines.vllm.declared import kv_cache_bytes, memory_defaults, replay_tokens
from mismatch_probe.notation import write_size

_GPU_SHARE: Final = 0.9
"""vLLM's default of `gpu_memory_utilization`."""
LIBRARY_BYTES: Final = 2**30
"""What a process on a CPU holds at least: libraries, their code and their workspaces."""
_LOGIT_BYTES: Final = 12
_PACKED_VOCABULARIES: Final = 2
"""What vLLM's CPU backend packs for its products and holds beside the weights: the embedding and the head, also where
both are one matrix (`UnquantizedEmbeddingMethod.process_weights_after_loading`)."""
_LIVE_WIDTHS: Final = 8
"""Tensors of a layer's width that live at once in a forward pass."""
_LIVE_SCORES: Final = 3
_MOST_HEAD_BYTES: Final = 2**30
_HEAD_LOGIT_BYTES: Final = 28
"""What the training path's head takes in chunks, in all passes that run at once, and for a logit of a short one."""


class ProcessMemory(BaseModel):
    """One process, or all ranks that share a host. An engine on a GPU fills the rest of its share with cached keys and
    values.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    process: str
    stage: str
    """The stage that needs most."""
    device: str
    peak_bytes: int
    """The most that it needs at once."""
    available_bytes: int
    """The device's memory for it."""
    advice: str = ""
    """What to do where that is too little."""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.available_bytes


def process_memory(plan: Plan, workload: Workload, calibration: Calibration) -> list[ProcessMemory]:
    """An estimate for each job of the plan; none for a server, nor for a training path spread over devices by a map."""
    spread = workload.settings.training.device_map is not None
    return [
        _of_job(job, workload, calibration)
        for job in plan.jobs
        if job.starts_engine or (job.stages[0].side.engine is None and not spread)
    ]


def _of_job(job: PlannedJob, workload: Workload, calibration: Calibration) -> ProcessMemory:
    engine = job.stages[0].side.engine
    key = key_of(job.stages[0])
    device = calibration.rates_of(key.process, key.dtype).device
    on_cpu = device == "cpu"
    needs = {
        stage.name: _scoring_bytes(stage, workload, calibration.free_memory_bytes.get(device), on_cpu)
        if engine is None
        else _engine_bytes(stage, workload, on_cpu)
        for stage in job.stages
        if engine is not None or computes(stage, workload)
    }
    worst = max(needs, key=lambda name: needs[name])
    on_this_device = max(job.num_ranks, 1) if on_cpu else 1
    share = 1.0
    if engine is not None and not on_cpu:
        share = float(engine.args.get("gpu_memory_utilization") or _GPU_SHARE)
    return ProcessMemory(
        process=job.name,
        stage=worst,
        device=device,
        peak_bytes=on_this_device * (int(needs[worst]) + (LIBRARY_BYTES if on_cpu else 0)),
        available_bytes=int(share * calibration.device_memory_bytes[device]),
        advice=_advice(next(stage for stage in job.stages if stage.name == worst), workload, on_cpu=on_cpu),
    )


def _advice(stage: Stage, workload: Workload, *, on_cpu: bool) -> str:
    """Ranks and workers on one host share its memory, so that more of them help on GPUs alone."""
    side, is_layered = stage.side, stage.name in workload.by_layer
    if side.role == "ref" and not is_layered:
        return "hold it layer by layer: --reference-by-layer"
    if on_cpu or is_layered:
        return "use a smaller model, or a device with more memory"
    if side.engine is not None:
        return "divide it: --vllm.tensor_parallel_size N over N GPUs, or ask a server that runs (--infer NAME:url=...)"
    return "hold it by more ranks: --train-ranks N over N GPUs"


def _engine_bytes(stage: Stage, workload: Workload, on_cpu: bool) -> float:
    """Weights, what a CPU's kernels pack of them, cached keys and values, and the logits of a replayed step."""
    assert stage.side.engine is not None
    architecture, args = workload.architecture_of(stage.side), stage.side.engine.args
    itemsize = stage.side.dtype.num_bytes
    longest = max(workload.prompt_tokens) + workload.settings.sampling.max_new_tokens + 1
    config = SimpleNamespace(
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        vocab_size=architecture.vocab_size,
    )
    sizes = memory_defaults(
        config, args, dtype_bytes=itemsize, max_model_len=longest, num_sequences=workload.sequences, on_cpu=on_cpu
    )
    one_sequence = kv_cache_bytes(config, itemsize, max_model_len=longest, num_sequences=1)
    cache = int(sizes.get("kv_cache_memory_bytes") or args.get("kv_cache_memory_bytes") or one_sequence)
    logits = replay_tokens(architecture.vocab_size) * architecture.vocab_size * _LOGIT_BYTES
    ranks = engine_number(stage.side, "tensor_parallel_size", 1)
    weights = architecture.parameters
    if on_cpu:
        weights += _PACKED_VOCABULARIES * architecture.vocab_size * architecture.hidden_size
    return weights * itemsize / ranks + max(cache, one_sequence) + logits


def _scoring_bytes(stage: Stage, workload: Workload, free_bytes: int | None, on_cpu: bool) -> float:
    """Weights, the activations of the passes that run at once, the head's chunks, and scores that are written out."""
    assert stage.side.training is not None
    architecture, dtype = workload.architecture_of(stage.side), stage.side.dtype
    kept_in_fp32 = stage.side.training.precision in ("autocast", "fsdp") and dtype.rounds_coarsely
    itemsize = 4 if kept_in_fp32 else dtype.num_bytes
    longest = int(workload.lengths.max())
    width = max(architecture.hidden_size, architecture.intermediate_size)
    at_once = min(workload.pass_tokens, CPU_PASS_TOKENS * (os.cpu_count() or 1)) if on_cpu else workload.pass_tokens
    activations = max(at_once, longest) * width * _LIVE_WIDTHS * itemsize
    head = min(_MOST_HEAD_BYTES, at_once * architecture.vocab_size * _HEAD_LOGIT_BYTES)
    scores = 0
    if isinstance(stage, FloorStage) and stage.attention == "eager":
        num_repeated = min(longest, LONGEST_REPEATED)
        scores = num_repeated**2 * architecture.num_heads * 4 * _LIVE_SCORES
    return _weight_bytes(stage, workload, free_bytes, itemsize, on_cpu) + activations + scores + head


def _weight_bytes(stage: Stage, workload: Workload, free_bytes: int | None, itemsize: int, on_cpu: bool) -> float:
    """Of the whole model; over ranks of a part, of what no layer holds and of two layers, gathered to compute;
    layer by layer of what no layer holds and of one layer, or of two where the next is read beside it, and of what is
    read of one as it is stored.
    """
    architecture, ranks = workload.architecture_of(stage.side), stage.side.num_ranks
    other, layer = architecture.outside_parameters * itemsize, architecture.layer_parameters * itemsize
    if ranks > 1 and stage.side.training is not None:
        degree = stage.side.training.tensor_parallel
        return rank_weight_bytes(architecture, itemsize, ranks=ranks, tensor_parallel=degree)
    if stage.name not in workload.by_layer or not isinstance(stage, ScoreStage):
        return architecture.parameters * itemsize
    reads_ahead = free_bytes is None or other + 2 * layer <= WEIGHTS_SHARE * free_bytes
    hidden_states = hidden_bytes(stage, workload) if on_cpu and not workload.hidden_on_disk else 0
    stored_layer = architecture.layer_parameters * (workload.checkpoint_dtype or stage.side.dtype).num_bytes
    return other + (2 if reads_ahead else 1) * layer + stored_layer + hidden_states


def stages_by_layer(stages: Sequence[Stage], workload: Workload, calibration: Calibration) -> dict[str, str]:
    """The stages of the reference that will hold one layer at a time, and why."""
    reference = workload.settings.reference
    layer_stages = {}
    for stage in stages:
        side = stage.side
        if side.role != "ref" or side.num_ranks or side.training is None:
            continue
        if side.rounded_to is not None and side.rounded_to == workload.checkpoint_dtype:
            continue
        needs_whole_model = side.training.adapter is not None or side.training.device_map is not None
        if needs_whole_model and not reference.by_layer:
            continue
        device = calibration.rates_of("training", side.dtype).device
        num_bytes = workload.architecture_of(side).parameters * side.dtype.num_bytes
        free = calibration.free_memory_bytes[device]
        if reference.holds_one_layer(num_bytes, free):
            sizes = (
                f"its weights in {side.dtype} take {write_size(num_bytes)}, and {write_size(free)} are free ({device})"
            )
            layer_stages[stage.name] = "reference.by_layer asks for it" if reference.by_layer else sizes
    return layer_stages


def with_stages_by_layer(workload: Workload, stages: Sequence[Stage], calibration: Calibration) -> Workload:
    """The workload that says which stages these are, and whether their hidden states are too many for memory."""
    workload = replace(workload, by_layer=frozenset(stages_by_layer(stages, workload, calibration)))
    on_disk = most_hidden_bytes(workload, stages) > HIDDEN_SHARE * calibration.free_memory_bytes["cpu"]
    return replace(workload, hidden_on_disk=on_disk)


def most_hidden_bytes(workload: Workload, stages: Sequence[Stage]) -> float:
    """Of the hidden states of one of these stages; they are written to disk, whether they are in memory too or not."""
    layer_stages = [stage for stage in stages if isinstance(stage, ScoreStage) and stage.name in workload.by_layer]
    return max((hidden_bytes(stage, workload) for stage in layer_stages), default=0.0)
