"""The cost model of `--dry-run`, asked for one way of a reference, an engine or pi."""

from dataclasses import dataclass
from typing import Any, Final

from mismatch_probe.compare.cost.earlier import Pace
from mismatch_probe.compare.cost.forecast import Starting
from mismatch_probe.compare.cost.memory import LIBRARY_BYTES, process_memory, with_stages_by_layer
from mismatch_probe.compare.cost.roofline import Architecture, Calibration, Rates
from mismatch_probe.compare.cost.stage_work import (
    ResponseLengths,
    Workload,
    key_of,
    loading_work,
    received_by_rank,
    work_of,
)
from mismatch_probe.compare.plan import Plan, PlannedJob, make_plan
from mismatch_probe.compare.stages import ScoreStage, Stage
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.dtypes import Dtype

REFERENCE: Final = "score-ref-fp32"
_MODEL: Final = "model"


@dataclass(frozen=True)
class Prediction:
    """Seconds until the first batch and of the batches; bytes without the libraries of a process, and what each of
    several ranks is sent by the others.
    """

    load_seconds: float
    score_seconds: float
    peak_bytes: float
    received_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.load_seconds + self.score_seconds


@dataclass(frozen=True)
class Task:
    """What is scored: prompts with one response each, weights stored in BF16."""

    prompts: int
    prompt_tokens: int
    response_tokens: int
    batch_tokens: int


def predict(
    architecture: Architecture,
    calibration: Calibration,
    task: Task,
    ready_seconds: float,
    stage_name: str = REFERENCE,
    **changes: Any,
) -> Prediction:
    """Of one stage of a comparison in BF16 with these further settings. ready_seconds: until a process has imported
    everything. Of an engine that compiles, what that takes is not in it.
    """
    values = {
        "model": {"path": _MODEL},
        "pairs": [["bf16", "bf16"]],
        "training": {"batch_tokens": task.batch_tokens},
        "sampling": {"max_new_tokens": task.response_tokens},
        "floors": {"num_sequences": 0},
        "full_vocabulary": {"positions": 0},
        "experts": {"num_sequences": 0},
    }
    settings: CompareSettings = parse_settings(CompareSettings, {**values, **changes})
    stage = next(planned for planned in make_plan(settings).stages if planned.name == stage_name)
    responses = ResponseLengths(float(task.response_tokens), task.response_tokens, "the task")
    prompts = [task.prompt_tokens] * task.prompts
    key = key_of(stage)
    rates = calibration.rates_of(key.process, key.dtype)
    on_cpu = rates.device == "cpu"
    workload = Workload({_MODEL: architecture}, settings, prompts, responses, Dtype.BF16, ranks_share_cores=on_cpu)
    workload = with_stages_by_layer(workload, [stage], calibration)
    start = Starting.on_this_machine(calibration, ready_seconds).span(stage, workload, Pace(calibration, []))
    return Prediction(
        load_seconds=rates.seconds(loading_work(stage, workload)) if start is None else start.likely_seconds,
        score_seconds=rates.seconds(work_of(stage, workload)),
        peak_bytes=_peak_bytes(stage, workload, calibration, rates),
        received_bytes=received_by_rank(stage, workload)
        if isinstance(stage, ScoreStage) and stage.side.num_ranks > 1
        else 0.0,
    )


def _peak_bytes(stage: Stage, workload: Workload, calibration: Calibration, rates: Rates) -> float:
    (memory,) = process_memory(Plan((PlannedJob("one", (stage,)),)), workload, calibration)
    return memory.peak_bytes - (LIBRARY_BYTES if rates.device == "cpu" else 0)
