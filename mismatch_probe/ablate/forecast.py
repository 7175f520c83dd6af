"""How long an ablation takes, whether a cell fits into memory, and where cells run side by side."""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from mismatch_probe.ablate.run import DONE, cell_state
from mismatch_probe.compare.cost.memory import ProcessMemory
from mismatch_probe.compare.cost.roofline import NO_TIME, Span
from mismatch_probe.compare.estimates import DryRun, look_ahead
from mismatch_probe.compare.preparation import prepare
from mismatch_probe.config.ablate import Ablation, GridCell
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import SanitySettings
from mismatch_probe.errors import UsageError
from mismatch_probe.notation import write_many, write_size
from mismatch_probe.provenance.environment import gpus
from mismatch_probe.records.ablation import AblationDirectory

_LEARN_PASSES: Final = 3
"""Forward passes that learning counts as: itself, and a backward pass of twice its work."""
_TRAINED_BYTES: Final = 16
"""Of a trained weight in FP32: itself, its gradient, and both moments of AdamW."""
_VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
_SAME_MACHINE: Final = 1.5
"""A cell takes between this much less and more than one of its variant that was run here."""


class VariantForecast(BaseModel):
    """The cells of a variant that are still to be run."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    label: str
    cells: int
    each: Span | None
    """The time of one; None where there is no estimate."""
    measured: bool = False
    """Whether it is that of cells which were run here."""
    because: str = ""
    """Why there is no estimate."""
    memory: ProcessMemory | None = None


class AblationForecast(BaseModel):
    """What `ablate --dry-run` says. Syncs, probes, checkpoints and pages are not counted."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    model: str
    variants: list[VariantForecast]
    total: Span | None
    """Of all cells, one after the other; None where one has no estimate."""


def forecast_ablation(
    ablation: Ablation, earlier: AblationDirectory | None, runs: Path, ready_seconds: float
) -> AblationForecast:
    """Measure this machine for a second or two for each variant that no cell of `earlier` shows.

    runs: the folder of earlier comparisons. ready_seconds: since the command began.

    Raises:
        UsageError: a variant cannot be trained.
    """
    variants = []
    for label, cells in ablation.variants().items():
        to_run = [cell for cell in cells if earlier is None or cell_state(earlier, cell) not in DONE]
        seconds = [] if earlier is None else _measured_seconds(earlier, cells)
        if seconds:
            each = Span.around(sum(seconds) / len(seconds), _SAME_MACHINE)
            variants.append(VariantForecast(label=label, cells=len(to_run), each=each, measured=True))
        else:
            variants.append(_from_comparison(label, cells[0], len(to_run), ablation.sanity, runs, ready_seconds))
    spans = [(variant.each, variant.cells) for variant in variants]
    is_known = all(each is not None or not number for each, number in spans)
    times = [_times(each, number) for each, number in spans if each is not None]
    return AblationForecast(
        model=", ".join(dict.fromkeys(cell.settings.model.path for cell in ablation.cells)),
        variants=variants,
        total=sum(times, start=NO_TIME) if is_known else None,
    )


def places_for(ablation: Ablation, at_once: int, forecast: AblationForecast) -> list[dict[str, str]]:
    """The environment variables of each of the cells that run at once: with GPUs, each cell has its own.

    Raises:
        UsageError: they do not fit into memory together, or there are fewer GPUs.
    """
    visible = _visible_gpus()
    if visible:
        each = max(_num_gpus(cell) for cell in ablation.cells)
        if at_once * each > len(visible):
            raise UsageError(
                f"--at-once {at_once}: each of the cells needs {write_many(each, 'GPU')} of its own, and "
                f"{len(visible)} can be used; give --at-once {max(1, len(visible) // each)}"
            )
        shares = [visible[place * each : (place + 1) * each] for place in range(at_once)]
        return [{_VISIBLE_GPUS: ",".join(share)} for share in shares]
    memories = [variant.memory for variant in forecast.variants if variant.cells and variant.memory is not None]
    if memories:
        largest = max(memories, key=lambda memory: memory.peak_bytes)
        if at_once * largest.peak_bytes > largest.available_bytes:
            raise UsageError(
                f"--at-once {at_once}: {at_once} cells need about {write_size(at_once * largest.peak_bytes)} of "
                f"{write_size(largest.available_bytes)}; give --at-once "
                f"{max(1, largest.available_bytes // largest.peak_bytes)}, or lower --max-new-tokens"
            )
    return [{} for _ in range(at_once)]


def _visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES lists up to a -1, or the numbers of all that there are; none without a GPU."""
    numbers = [str(number) for number in range(len(gpus()))]
    choice = os.environ.get(_VISIBLE_GPUS)
    if not numbers or choice is None:
        return numbers
    names = [name.strip() for name in choice.split(",") if name.strip()]
    return names[: names.index("-1")] if "-1" in names else names


def _num_gpus(cell: GridCell) -> int:
    """Of the engine, which the policy shares."""
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    return prod(int(cell.settings.engine.args.get(name) or 1) for name in names)


def _measured_seconds(earlier: AblationDirectory, cells: Sequence[GridCell]) -> list[float]:
    """Of the cells that are done."""
    seconds = earlier.read_ablation_manifest().seconds
    return [seconds[cell.name] for cell in cells if cell.name in seconds and cell_state(earlier, cell) in DONE]


def _from_comparison(
    label: str, cell: GridCell, num_cells: int, sanity: SanitySettings | None, runs: Path, ready_seconds: float
) -> VariantForecast:
    if cell.settings.server is not None:
        why = "how fast a server is cannot be measured here"
        return VariantForecast(label=label, cells=num_cells, each=None, because=why)
    plan = look_ahead(prepare(_comparison_of_step(cell)), runs, (), ready_seconds)
    if plan.outlook is None:
        return VariantForecast(label=label, cells=num_cells, each=None, because=plan.no_outlook_because)
    starts = [stage.start for stage in plan.outlook.time.stages if stage.start is not None]
    steps = _times(_step(plan, cell), cell.settings.steps)
    tries = NO_TIME if sanity is None else _times(_sampling(plan), _steps_of_candidates(cell, sanity))
    memory = _cell_memory(plan.outlook.memory, cell, plan.parameters)
    return VariantForecast(
        label=label, cells=num_cells, each=sum(starts, start=plan.outlook.time.ready) + tries + steps, memory=memory
    )


def _comparison_of_step(cell: GridCell) -> CompareSettings:
    """A comparison whose responses are those of one step, and which scores them once."""
    settings = cell.settings
    values: dict[str, Any] = {
        "model": settings.model.model_dump(),
        "prompts": {"source": settings.task.source, "num_prompts": settings.rollout.prompts},
        "sampling": {
            "samples_per_prompt": settings.rollout.samples,
            "max_new_tokens": settings.rollout.max_new_tokens,
            "temperature": settings.rollout.temperature,
            "seed": settings.seed,
        },
        "pairs": [[settings.train_dtype.value, settings.infer_dtype.value]],
        "engine": {**settings.engine.model_dump(), "prefill": False},
        "reference": {"dtype": "none", "rounded_weights": False},
        "floors": {"num_sequences": 0},
        "full_vocabulary": {"positions": 0},
    }
    return CompareSettings.model_validate(values)


def _sampling(plan: DryRun) -> Span:
    assert plan.outlook is not None
    return sum((each.work for each in plan.outlook.time.stages if each.stage.startswith("sample")), start=NO_TIME)


def _step(plan: DryRun, cell: GridCell) -> Span:
    """Sampling, learning, and with several updates a step the scoring before them."""
    assert plan.outlook is not None
    scoring = sum((each.work for each in plan.outlook.time.stages if each.stage.startswith("train")), start=NO_TIME)
    passes = _LEARN_PASSES + (cell.settings.rollout.updates > 1)
    return _sampling(plan) + _times(scoring, passes)


def _steps_of_candidates(cell: GridCell, sanity: SanitySettings) -> float:
    """At most: how many steps' responses it takes to try all candidates."""
    rollout = cell.settings.rollout
    return sanity.candidates * sanity.solve_samples / (rollout.prompts * rollout.samples)


def _cell_memory(memory: Sequence[ProcessMemory], cell: GridCell, parameters: int) -> ProcessMemory | None:
    """Of the one process that holds engine, policy and optimizer; adapters are counted as if all weights were trained.

    None where a process has no estimate, or they are on several devices.
    """
    if len(memory) != 2 or len({each.device for each in memory}) > 1:
        return None
    return ProcessMemory(
        process="a cell",
        stage="a step",
        device=memory[0].device,
        peak_bytes=sum(each.peak_bytes for each in memory) + _TRAINED_BYTES * parameters,
        available_bytes=min(each.available_bytes for each in memory),
        advice="lower --max-new-tokens, --samples-per-prompt or policy.micro_batch_tokens",
    )


def _times(span: Span, number: float) -> Span:
    return Span(
        low_seconds=span.low_seconds * number,
        likely_seconds=span.likely_seconds * number,
        high_seconds=span.high_seconds * number,
    )
