"""The catalogue's faults of the engine: real vLLM, started or asked with the fault."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.fault_lab import in_training
from benchmarks.fault_lab.bench import Bench, Injection, Make, at_strengths
from benchmarks.fault_lab.in_log import relabel_engine
from benchmarks.fault_lab.models import rope
from benchmarks.fault_lab.recording import BenchRun, score_again
from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.run_directory import RunDirectory


def engine_faults(bench: Bench) -> Iterator[Injection]:
    """Every fault that the engine of this model can have."""
    yield from at_strengths(
        "top-p in the engine",
        "engine",
        (Code.TRUNCATED_SUPPORT,),
        {f"top_p = {value:g}": sampled(top_p=value) for value in (0.999, 0.95, 0.7)},
        usual=("top_p = 0.95", "top_p = 0.7"),
    )
    yield from at_strengths(
        "top-k in the engine", "engine", (Code.TRUNCATED_SUPPORT,), {"top_k = 20": sampled(top_k=20)}
    )
    yield from at_strengths(
        "temperature in the engine",
        "engine",
        (Code.TEMPERATURE,),
        {f"T = {value:g}": sampled(temperature=value) for value in (0.95, 0.7)},
    )
    yield from at_strengths(
        "generation_config defaults in the engine",
        "engine",
        (Code.TEMPERATURE, Code.TRUNCATED_SUPPORT),
        {"T = 0.6, top_p = 0.95, top_k = 20": sampled(temperature=0.6, top_p=0.95, top_k=20)},
    )
    if Dtype.FP16 in bench.dtypes:
        yield from at_strengths(
            "another dtype in the engine than the run says",
            "engine",
            (Code.ONE_SIDED_DTYPE,),
            {"fp16 for bf16": partial(_relabelled, really=Dtype.FP16)},
        )
    theta = {"rope_parameters": rope(bench.checkpoint, times=2)}
    yield from at_strengths(
        "RoPE base in the engine", "engine", (Code.POSITIONS,), {"x 2": partial(_overridden, changes=theta)}
    )
    yield from at_strengths(
        "stale weights in the engine",
        "engine",
        (Code.STALE_WEIGHTS,),
        {f"{size:g} of each tensor": partial(_stale, size=size) for size in (1e-3, 1e-2)},
    )


def _relabelled(bench: Bench, really: Dtype) -> BenchRun:
    def inject(run: RunDirectory) -> None:
        relabel_engine(run, Dtype.BF16, really)
        score_again(run, bench.open_clean)

    return BenchRun(bench.injected(f"engine-{really}", inject), bench.open_clean)


def sampled(**sampling: Any) -> Make:
    return partial(_sampled, sampling=sampling)


def _sampled(bench: Bench, sampling: dict[str, Any]) -> BenchRun:
    return bench.in_engine("-".join(f"{key}{value}" for key, value in sampling.items()), sampling=sampling)


def _overridden(bench: Bench, changes: dict[str, Any]) -> BenchRun:
    return bench.in_engine("-".join(changes), hf_overrides=changes)


def _stale(bench: Bench, size: float) -> BenchRun:
    older = in_training.other_weights(bench.checkpoint, bench.edited(f"older{size}"), size)
    return bench.in_engine(f"stale{size}", checkpoint=older)
