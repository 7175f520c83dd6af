"""How much memory each process of a comparison needs, set against its device, and the outlook as a whole."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from pydantic import BaseModel, ConfigDict

from mismatch_probe.children.start import Job, run
from mismatch_probe.compare.cost.architecture import (
    Architecture,
    ResponseLengths,
    Workload,
    read_architecture,
    workload_of,
)
from mismatch_probe.compare.cost.earlier import (
    EarlierRun,
    earlier_runs,
    most_hidden_bytes,
    stages_by_layer,
    with_stages_by_layer,
)
from mismatch_probe.compare.cost.forecast import Forecast, Pace, Starting, forecast
from mismatch_probe.compare.cost.rates import Calibration, Process, Rates
from mismatch_probe.compare.cost.stage_work import computes, engine_number, hidden_bytes, rank_weight_bytes, what_of
from mismatch_probe.compare.plan import Plan, PlannedJob, make_plan
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import LONGEST_REPEATED, FloorStage, ScoreStage, Stage
from mismatch_probe.config.model import WEIGHTS_SHARE
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.vllm.declared import kv_cache_bytes, memory_defaults, replay_tokens
from mismatch_probe.provenance.checkpoint import weight_files
from mismatch_probe.records.manifest import Manifest

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
_CPU_PASS_TOKENS: Final = 3072
"""What the training path computes on a processor's core at a time."""
_MOST_HEAD_BYTES: Final = 2**30
_HEAD_LOGIT_BYTES: Final = 28
"""What the training path's head takes in chunks, in all passes that run at once, and for a logit of a short one."""


class ProcessMemory(BaseModel):
    """One process, or all ranks that share a host: the most that it needs at once and the stage that needs it, on a
    device that has available_bytes of memory for it. advice: what to do where that is too little. An engine on a GPU
    fills the rest of its share with cached keys and values.
    """

    model_config = ConfigDict(frozen=True)

    process: str
    stage: str
    device: str
    peak_bytes: int
    available_bytes: int
    advice: str = ""

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
    what = what_of(job.stages[0])
    device = calibration.rates_of(what.process, what.dtype).device
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
        config,
        args,
        dtype_bytes=itemsize,
        max_model_len=longest,
        num_sequences=workload.sequences,
        on_cpu=on_cpu,
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
    kept_in_fp32 = stage.side.training.precision in ("autocast", "fsdp") and dtype.is_16_bit
    itemsize = 4 if kept_in_fp32 else dtype.num_bytes
    longest = int(workload.lengths.max())
    width = max(architecture.hidden_size, architecture.intermediate_size)
    at_once = min(workload.pass_tokens, _CPU_PASS_TOKENS * (os.cpu_count() or 1)) if on_cpu else workload.pass_tokens
    activations = max(at_once, longest) * width * _LIVE_WIDTHS * itemsize
    head = min(_MOST_HEAD_BYTES, at_once * architecture.vocab_size * _HEAD_LOGIT_BYTES)
    scores = 0
    if isinstance(stage, FloorStage) and stage.attention == "eager":
        repeated = min(longest, LONGEST_REPEATED)
        scores = repeated**2 * architecture.num_heads * 4 * _LIVE_SCORES
    return _weight_bytes(stage, workload, free_bytes, itemsize, on_cpu) + activations + scores + head


def _weight_bytes(stage: Stage, workload: Workload, free_bytes: int | None, itemsize: int, on_cpu: bool) -> float:
    """Of the whole model; over ranks of a part, of what no layer holds and of two layers, gathered to compute;
    layer by layer of what no layer holds and of one layer, or of two where the next is read beside it, and of what is
    read of one as it is stored.
    """
    architecture, ranks = workload.architecture_of(stage.side), stage.side.num_ranks
    other, layer = architecture.outside_parameters * itemsize, architecture.layer_parameters * itemsize
    if ranks > 1 and stage.side.training is not None:
        divided = stage.side.training.tensor_parallel
        return rank_weight_bytes(architecture, itemsize, ranks=ranks, tensor_parallel=divided)
    if stage.name not in workload.by_layer or not isinstance(stage, ScoreStage):
        return architecture.parameters * itemsize
    reads_ahead = free_bytes is None or other + 2 * layer <= WEIGHTS_SHARE * free_bytes
    hidden_states = hidden_bytes(stage, workload) if on_cpu and not workload.hidden_on_disk else 0
    stored_layer = architecture.layer_parameters * (workload.checkpoint_dtype or stage.side.dtype).num_bytes
    return other + (2 if reads_ahead else 1) * layer + stored_layer + hidden_states


MAX_NEW_TOKENS = "max_new_tokens"


class Outlook(BaseModel):
    """response_tokens: of a response on average, as counted here; response_tokens_from: the earlier run that tells it,
    or `max_new_tokens` where none does. earlier_runs: whose measured stages went into `time`. rates: measured now.
    by_layer: the stages that will hold one layer of the weights at a time, and why. hidden_bytes: of the hidden states
    that stand on disk meanwhile, at most.
    """

    model_config = ConfigDict(frozen=True)

    response_tokens: float
    response_tokens_from: str
    earlier_runs: list[str]
    rates: list[Rates]
    time: Forecast
    memory: list[ProcessMemory]
    by_layer: dict[str, str] = {}
    hidden_bytes: int = 0


def outlook(preparation: Preparation, runs: Path, names_done: Sequence[str], ready_seconds: float) -> Outlook:
    """Measure this machine for a second or two and look at the runs in the folder `runs`.

    done: names of stages that are recorded already. ready_seconds: since the command began.

    Raises:
        UnknownArchitecture: nobody knows what the checkpoint computes.
        MismatchProbeError: the device cannot be used.
    """
    manifest, settings = preparation.manifest, preparation.manifest.settings
    architectures = read_architectures(manifest)
    own = architectures[settings.model.path]
    runs_before = earlier_runs(runs, manifest, own)
    workload = expected_workload(preparation, architectures, runs_before)
    plan = make_plan(settings)
    calibration = measure_for(preparation, own, plan.stages)
    workload = with_stages_by_layer(workload, plan.stages, calibration)
    limit = settings.sampling.max_new_tokens
    at_the_limit = replace(workload, responses=ResponseLengths(float(limit), limit, MAX_NEW_TOKENS))
    pace = Pace(calibration, [stage for run in runs_before for stage in run.stages])
    starting = Starting.on_this_machine(calibration, ready_seconds)
    stages: list[Stage] = [stage for stage in plan.stages if stage.name not in names_done]
    return Outlook(
        response_tokens=workload.responses.mean_tokens,
        response_tokens_from=workload.responses.source,
        earlier_runs=[str(run.path) for run in runs_before if run.stages],
        rates=calibration.rates,
        time=forecast(stages, workload, pace, starting),
        memory=process_memory(plan, workload, calibration),
        by_layer=stages_by_layer(plan.stages, workload, calibration),
        hidden_bytes=int(most_hidden_bytes(at_the_limit, plan.stages)),
    )


def read_architectures(manifest: Manifest) -> dict[str, Architecture]:
    """Of every checkpoint of a run, by the path that its sides name.

    Raises:
        UnknownArchitecture: nobody knows what one computes.
        UsageError: one cannot be read.
    """
    checkpoints = {manifest.settings.model.path: manifest.model, **manifest.checkpoints}
    return {path: read_architecture(Path(identity.folder)) for path, identity in checkpoints.items()}


def expected_workload(
    preparation: Preparation, architectures: Mapping[str, Architecture], runs: Sequence[EarlierRun]
) -> Workload:
    """With responses as long as those of the newest earlier run on such prompts, or at their limit."""
    manifest, limit = preparation.manifest, preparation.manifest.settings.sampling.max_new_tokens
    source = manifest.settings.prompts.source
    earlier_lengths = (run.responses for run in runs if run.prompts_source == source and run.limit_tokens >= limit)
    at_the_limit = ResponseLengths(float(limit), limit, MAX_NEW_TOKENS)
    lengths = [len(prompt.token_ids) for prompt in preparation.prompts]
    return workload_of(manifest, architectures, lengths, next(earlier_lengths, at_the_limit))


def measure_for(preparation: Preparation, architecture: Architecture, stages: Sequence[Stage]) -> Calibration:
    """Rates of what the stages run in; nothing here tells of a server. Raises as `measure_rates`."""
    kinds = dict.fromkeys((what.process, what.dtype) for what in map(what_of, stages) if what.process != "server")
    manifest = preparation.manifest
    device, folder = manifest.settings.training.device, Path(manifest.model.folder)
    return measure_rates(architecture, list(kinds), device, folder)


def measure_rates(
    architecture: Architecture, kinds: Sequence[tuple[Process, Dtype]], training_device: str, folder: Path
) -> Calibration:
    """Rates of each process and dtype, and of reading a checkpoint's folder; the engine's are those of the GPU where
    PyTorch sees one.

    Raises:
        MismatchProbeError: the device cannot be used, or the job died.
    """
    largest = max(weight_files(folder), key=lambda path: path.stat().st_size)
    widths = {
        "hidden": architecture.hidden_size,
        "queries": architecture.num_heads * architecture.head_dim,
        "keys": architecture.num_kv_heads * architecture.head_dim,
        "intermediate": architecture.intermediate_size,
        "heads": architecture.num_heads,
        "head_dim": architecture.head_dim,
    }
    job = Job(
        name="measuring how fast this machine is",
        function="mismatch_probe.training_path.timing:measure",
        arguments=(widths, [list(work) for work in kinds], training_device, str(largest)),
        preload="training",
        when_killed="free some and try again",
    )
    return Calibration.model_validate(run(job))
