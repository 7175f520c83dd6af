"""Run directories made by the real writers from simulated log-probs, for tests that need a run and no engine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from shutil import copyfile, copytree
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe import __version__
from mismatch_probe.compare.plan import make_plan, sample_requests
from mismatch_probe.compare.stages import SampleStage, ScoreStage
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.stored_tensors import adapter_key
from mismatch_probe.reading import merge_tables
from mismatch_probe.records.legs import Legs, write_prompts, write_rollouts
from mismatch_probe.records.manifest import Manifest, ModelIdentity, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import (
    EncodedPrompt,
    SampledSequence,
    SampleRequest,
    ScoredSequence,
    TokenSequence,
)
from mismatch_probe.records.tables import leg_table, rollouts_table, write_table

Vector = npt.NDArray[np.float64]

_MOMENTS = count()
"""When a run was made: no two at once."""

ERROR_NATS: dict[Dtype, float] = {Dtype.BF16: 1e-2, Dtype.FP16: 1.2e-3, Dtype.FP32: 1e-6, Dtype.FP64: 0.0}


@dataclass(frozen=True)
class Simulation:
    """What is simulated; `worse` multiplies the training side's error, `token_seed` decides the sampled ids.

    first_prompt: only the prompts from this number on have responses, as in an extension. train, infer: sides with
    settings of their own, as a file declares them; applied: what stages read back, by their names, where it is more
    than the dtype; adapters: folders and fingerprints of those that sides compute with.
    """

    num_prompts: int = 64
    first_prompt: int = 0
    samples_per_prompt: int = 1
    pairs: tuple[tuple[str, str], ...] = ((Dtype.BF16, Dtype.BF16),)
    train: tuple[dict[str, Any], ...] = ()
    infer: tuple[dict[str, Any], ...] = ()
    applied: dict[str, dict[str, Any]] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    mean_length: int = 60
    worse: float = 1.0
    token_seed: int = 0
    noise_seed: int = 0
    fingerprint: str = "checkpoint-a"
    vllm: str = "0.32.0"
    sampling: dict[str, Any] | None = None
    run_key: str = ""


def simulated_run(path: Path, simulation: Simulation, *, with_summary: bool = False) -> RunDirectory:
    """A finished run: rollouts, the legs of every pair, an FP32 reference, a manifest, and a summary on request."""
    key = (repr(simulation), with_summary)
    if key not in _made:
        _made[key] = Path(_home.name) / str(len(_made))
        _write(RunDirectory(_made[key]), simulation, with_summary=with_summary)
    run = RunDirectory(copytree(_made[key], path))
    run.write_manifest(simulated_manifest(simulation))
    return run


_home: Final = TemporaryDirectory(prefix="simulated-runs-")
_made: Final[dict[tuple[str, bool], Path]] = {}
"""Runs of this process by how they were asked for: each is computed once, then copied."""


def _write(run: RunDirectory, simulation: Simulation, *, with_summary: bool) -> None:
    settings = _settings(simulation)
    prompts = simulated_prompts(simulation)[simulation.first_prompt :]
    plan = make_plan(settings)
    legs = Legs(run, simulation.run_key)
    run.path.mkdir(parents=True)
    write_prompts(run, simulation.run_key, prompts)
    rollouts, sequences = [], {}
    for stage in plan.sample_stages:
        requests = sample_requests(prompts, settings.sampling, stage.side)
        sequences[stage.side.sampler] = [_sequence(request, simulation) for request in requests]
        table, leg = _sampled(requests, sequences[stage.side.sampler], stage, simulation)
        rollouts.append(table)
        legs.write(stage.leg, leg)
    write_rollouts(run, simulation.run_key, pa.concat_tables(rollouts))
    for stage in plan.stages:
        if isinstance(stage, ScoreStage):
            chosen = [sequence for sampler in stage.samplers for sequence in sequences[sampler]]
            legs.write(stage.leg, _scored(chosen, stage, simulation))
    if with_summary:
        manifest = simulated_manifest(simulation)
        run.write_manifest(manifest)
        run.write_summary(summarise(run, manifest))


def edit_leg(run: RunDirectory, leg: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a leg's columns (name to list of rows) in place."""
    from mismatch_probe.records.tables import read_table

    table = read_table(run.leg_path(leg))
    columns = table.to_pydict()
    change(columns)
    write_table(run.leg_path(leg), pa.table(columns, schema=table.schema))


def edit_manifest(run: RunDirectory, change: Callable[[Manifest], None]) -> None:
    manifest = run.read_manifest()
    change(manifest)
    run.write_manifest(manifest)


def make_ill_conditioned(run: RunDirectory, nats: float = 3e-3) -> None:
    """Turn a run in FP32 into one whose checkpoint FP32 cannot compute: every leg errs by rounding of this size, and
    the reference in FP64 does not.
    """
    copyfile(run.leg_path("ref-fp32"), run.leg_path("ref-fp64"))
    for leg in ("ref-fp32", "train-fp32", "infer-fp32-decode"):
        edit_leg(run, leg, partial(_add_errors, nats, _generator("ill-conditioned", leg)))
    stages = {"score-ref-fp64": StageRecord(state="done", effective_settings={"dtype": "fp64"})}
    edit_manifest(run, lambda manifest: manifest.stages.update(stages))
    edit_manifest(run, lambda manifest: manifest.rounding_checks.append("fp32"))
    run.write_summary(summarise(run, run.read_manifest()))


def _add_errors(nats: float, generator: np.random.Generator, columns: dict[str, Any]) -> None:
    rows = [np.asarray(row) for row in columns["logprobs"]]
    columns["logprobs"] = [np.minimum(row + nats * generator.normal(size=row.size), 0.0).tolist() for row in rows]


def simulated_prompts(simulation: Simulation) -> list[EncodedPrompt]:
    return [EncodedPrompt(f"sums-{number}", [1, 2, 3 + number], "sum") for number in range(simulation.num_prompts)]


def _settings(simulation: Simulation) -> CompareSettings:
    values: dict[str, Any] = {
        "model": {"path": "simulated"},
        "pairs": simulation.pairs,
        "train": simulation.train,
        "infer": simulation.infer,
        "prompts": {"num_prompts": simulation.num_prompts},
        "sampling": {"samples_per_prompt": simulation.samples_per_prompt},
        "engine": {"prefill": False, "batch_sequences": 64},
        "reference": {"rounded_weights": False},
        "floors": {"num_sequences": 0},
        "full_vocabulary": {"positions": 0},
    }
    return parse_settings(CompareSettings, merge_tables(values, {"sampling": simulation.sampling or {}}))


def simulated_manifest(simulation: Simulation) -> Manifest:
    settings = _settings(simulation)
    return Manifest(
        tool_version=__version__,
        created_at=f"2026-01-01T00:00:00.{next(_MOMENTS):06}+00:00",
        command=["mismatch-probe", "compare"],
        settings=settings,
        model=ModelIdentity(
            name="simulated",
            folder="simulated",
            fingerprint=simulation.fingerprint,
            architecture="SimulatedForCausalLM",
            context_length=None,
            checkpoint_dtype=Dtype.FP32,
            weight_bytes=0,
        ),
        content_keys={
            "settings": str(simulation.num_prompts),
            "model": simulation.fingerprint,
            "prompts": str(simulation.num_prompts),
            "versions": simulation.vllm,
            **{adapter_key(folder): fingerprint for folder, fingerprint in simulation.adapters.items()},
        },
        versions={"vllm": simulation.vllm, "torch": "2.13.0"},
        hardware={"gpus": []},
        git=None,
        run_key=simulation.run_key,
        stages={
            stage.name: StageRecord(
                state="done",
                batches=1,
                batches_done=1,
                effective_settings=simulation.applied.get(stage.name, {"dtype": stage.side.dtype}),
            )
            for stage in make_plan(settings).stages
        },
    )


def _generator(*words: object) -> np.random.Generator:
    return np.random.default_rng(np.frombuffer("/".join(map(str, words)).encode(), dtype=np.uint8).astype(np.uint32))


def _sequence(request: SampleRequest, simulation: Simulation) -> TokenSequence:
    random = _generator("ids", simulation.token_seed, request.id)
    length = max(4, int(simulation.mean_length * random.lognormal(0, 0.4)))
    return TokenSequence(request.id, request.prompt.token_ids, random.integers(0, 1000, length).tolist())


def _reference(sequence: TokenSequence) -> Vector:
    """Log-probs of a confident model: half the tokens are nearly certain."""
    random = _generator("reference", sequence.id, sequence.token_ids)
    length = len(sequence.token_ids)
    return np.asarray(-0.01 - random.exponential(1.0, length) * (random.random(length) < 0.5))


def _leg(sequence: TokenSequence, name: str, error_nats: float, simulation: Simulation) -> ScoredSequence:
    """The reference and an error whose scale each sequence has for itself; heavier than normal."""
    random = _generator(name, simulation.noise_seed, sequence.id)
    reference = _reference(sequence)
    scale = error_nats * random.lognormal(0, 0.3)
    return ScoredSequence(sequence.id, np.minimum(reference + scale * random.standard_t(5, reference.size), 0.0))


def _sampled(
    requests: list[SampleRequest], sequences: list[TokenSequence], stage: SampleStage, simulation: Simulation
) -> tuple[pa.Table, pa.Table]:
    sampled = [
        SampledSequence(
            sequence=sequence,
            scores=_leg(sequence, stage.leg, ERROR_NATS[stage.side.dtype], simulation),
            finish_reason="stop",
            token_texts=["<script>"] * len(sequence.token_ids),
        )
        for sequence in sequences
    ]
    table = rollouts_table(requests, sampled, stage.side.sampler)
    return table, leg_table(sequences, [response.scores for response in sampled])


def _scored(sequences: Iterable[TokenSequence], stage: ScoreStage, simulation: Simulation) -> pa.Table:
    chosen = list(sequences)
    error = 0.0 if stage.side.role == "ref" else ERROR_NATS[stage.side.dtype] * simulation.worse
    return leg_table(chosen, [_leg(sequence, stage.leg, error, simulation) for sequence in chosen])
