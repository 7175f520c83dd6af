"""Real runs to inject faults into: recorded once through the product's own pipeline, then scored again where needed."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preparation import prepare
from mismatch_probe.compare.run import execute, start_run
from mismatch_probe.compare.stages import ScoreStage, scored_with_starts
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.tables import leg_table, read_table, sequences_of
from mismatch_probe.training_path import plan_batches

CLEAN_DTYPES: tuple[Dtype, ...] = (Dtype.BF16, Dtype.FP16, Dtype.FP32)
FAULT_DTYPES: tuple[Dtype, ...] = (Dtype.BF16, Dtype.FP32)
"""Faults are judged with the FP32 pair that decides beside the 16-bit pair that is looked at."""

Score = Callable[[list[TokenSequence]], list[ScoredSequence]]
OpenScorer = Callable[[Dtype, bool], AbstractContextManager["TrainingSide"]]


class TrainingSide:
    """A loaded scorer as a fault made it: how it scores, and what it says of itself."""

    def __init__(self, score: Score, effective_settings: dict[str, Any]) -> None:
        self.score = score
        self.effective_settings = effective_settings


def record(
    path: Path,
    checkpoint: Path,
    prompts: str,
    dtypes: Sequence[Dtype],
    *,
    num_prompts: int,
    num_tokens: int,
    sampling: dict[str, Any] | None = None,
    engine_args: dict[str, Any] | None = None,
) -> RunDirectory:
    """A run made by the pipeline, or the one that is there already."""
    if RunDirectory(path).summary_path.exists():
        return RunDirectory(path)
    shutil.rmtree(path, ignore_errors=True)
    settings = CompareSettings.model_validate(
        {
            "model": {"path": str(checkpoint)},
            "pairs": [(dtype, dtype) for dtype in dtypes],
            "prompts": {"source": prompts, "num_prompts": num_prompts},
            "sampling": {"max_new_tokens": num_tokens, **(sampling or {})},
            "engine": {"args": {"enforce_eager": True, **(engine_args or {})}},
            "floors": {"num_sequences": 0},
            "full_vocabulary": {"positions": 0},
        }
    )
    run = start_run(path, prepare(settings))
    execute(run, lambda event: None)
    return run


def copy_of(run: RunDirectory, path: Path) -> RunDirectory:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(run.path, path)
    return RunDirectory(path)


def keep_pairs(run: RunDirectory, dtypes: Sequence[Dtype]) -> None:
    """Let the run be about these dtypes only."""
    manifest = run.read_manifest()
    settings = manifest.settings.model_copy(update={"pairs": tuple((dtype, dtype) for dtype in dtypes)})
    run.write_manifest(manifest.model_copy(update={"settings": settings}))


def score_again(run: RunDirectory, open_scorer: OpenScorer) -> None:
    """Replace the legs of the training path and of its reference by what `open_scorer` gives."""
    manifest = run.read_manifest()
    legs = Legs(run, manifest.run_key)
    rollouts = read_table(run.rollouts_path, columns=["id", "sampler", "prompt_token_ids", "token_ids"])
    sequences = dict(zip(rollouts["id"].to_pylist(), sequences_of(rollouts), strict=True))
    samplers = rollouts["sampler"].to_pylist()
    stages = [stage for stage in make_plan(manifest.settings).stages if isinstance(stage, ScoreStage)]
    for stage in (stage for stage in stages if stage.side.rounded_to is None):
        chosen = [sequence for sequence, by in zip(sequences.values(), samplers, strict=True) if by in stage.samplers]
        with open_scorer(stage.side.dtype, stage.side.role == "ref") as side:
            scored: list[ScoredSequence | None] = [None] * len(chosen)
            for rows in plan_batches([sequence.num_tokens for sequence in chosen], 8192):
                for row, start in zip(rows, scored_with_starts(side.score, [chosen[row] for row in rows]), strict=True):
                    scored[row] = start
            manifest.stages[stage.name].effective_settings = side.effective_settings
        legs.write(stage.leg, leg_table(chosen, [scores for scores in scored if scores is not None]))
    run.write_manifest(manifest)
    run.summary_path.unlink(missing_ok=True)
