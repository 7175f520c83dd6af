"""What is known before a comparison starts: how long it will take, and how much memory its processes need."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mismatch_probe.children.start import Job, run
from mismatch_probe.compare.cost.architecture import Architecture, read_architecture
from mismatch_probe.compare.cost.by_layer import most_hidden_bytes, stages_by_layer, with_stages_by_layer
from mismatch_probe.compare.cost.earlier import EarlierRun, earlier_runs
from mismatch_probe.compare.cost.forecast import Forecast, Starting, forecast
from mismatch_probe.compare.cost.memory import ProcessMemory, process_memory
from mismatch_probe.compare.cost.pace import Pace
from mismatch_probe.compare.cost.rates import Calibration, Process, Rates
from mismatch_probe.compare.cost.stage_work import what_of
from mismatch_probe.compare.cost.workload import ResponseLengths, Workload, workload_of
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.stages import Stage
from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.checkpoint import weight_files
from mismatch_probe.records.manifest import Manifest

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


def outlook(preparation: Preparation, runs: Path, done: Sequence[str], ready_seconds: float) -> Outlook:
    """Measure this machine for a second or two and look at the runs in the folder `runs`.

    done: names of stages that are recorded already. ready_seconds: since the command began.

    Raises:
        UnknownArchitecture: nobody knows what the checkpoint computes.
        MismatchProbeError: the device cannot be used.
    """
    manifest, settings = preparation.manifest, preparation.manifest.settings
    architectures = read_architectures(manifest)
    own = architectures[settings.model.path]
    earlier = earlier_runs(runs, manifest, own)
    workload = expected_workload(preparation, architectures, earlier)
    plan = make_plan(settings)
    calibration = measure_for(preparation, own, plan.stages)
    workload = with_stages_by_layer(workload, plan.stages, calibration)
    limit = settings.sampling.max_new_tokens
    at_the_limit = replace(workload, responses=ResponseLengths(float(limit), limit, MAX_NEW_TOKENS))
    pace = Pace(calibration, [stage for run in earlier for stage in run.stages])
    starting = Starting.here(calibration, ready_seconds)
    left: list[Stage] = [stage for stage in plan.stages if stage.name not in done]
    return Outlook(
        response_tokens=workload.responses.mean_tokens,
        response_tokens_from=workload.responses.source,
        earlier_runs=[str(run.path) for run in earlier if run.stages],
        rates=calibration.rates,
        time=forecast(left, workload, pace, starting),
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
    preparation: Preparation, architectures: Mapping[str, Architecture], earlier: Sequence[EarlierRun]
) -> Workload:
    """With responses as long as those of the newest earlier run on such prompts, or at their limit."""
    manifest, limit = preparation.manifest, preparation.manifest.settings.sampling.max_new_tokens
    source = manifest.settings.prompts.source
    known = (run.responses for run in earlier if run.prompts_source == source and run.limit_tokens >= limit)
    at_the_limit = ResponseLengths(float(limit), limit, MAX_NEW_TOKENS)
    lengths = [len(prompt.token_ids) for prompt in preparation.prompts]
    return workload_of(manifest, architectures, lengths, next(known, at_the_limit))


def measure_for(preparation: Preparation, architecture: Architecture, stages: Sequence[Stage]) -> Calibration:
    """Rates of what the stages run in; nothing here tells of a server. Raises as `measure_rates`."""
    asked = dict.fromkeys((what.process, what.dtype) for what in map(what_of, stages) if what.process != "server")
    manifest = preparation.manifest
    device, folder = manifest.settings.training.device, Path(manifest.model.folder)
    return measure_rates(architecture, list(asked), device, folder)


def measure_rates(
    architecture: Architecture, asked: Sequence[tuple[Process, Dtype]], training_device: str, folder: Path
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
        arguments=(widths, [list(work) for work in asked], training_device, str(largest)),
        preload="training",
        when_killed="free some and try again",
    )
    return Calibration.model_validate(run(job))
