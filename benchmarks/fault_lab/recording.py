"""Real runs to inject faults into: recorded once through the product's own pipeline, then scored again where needed."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.compare.plan import plan_of
from mismatch_probe.compare.preparation import prepare
from mismatch_probe.compare.run import execute, start_run
from mismatch_probe.compare.stages import ScoreStage, repeated_rows, scored_with_starts
from mismatch_probe.compare.summarise import sides_to_check, summarise
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import leg_table, read_table, sequences_of
from mismatch_probe.training_path import Scorer, plan_batches
from mismatch_probe.verdict.preflight.facts import AGREEMENT

CLEAN_DTYPES: tuple[Dtype, ...] = (Dtype.BF16, Dtype.FP16, Dtype.FP32)
FAULT_DTYPES: tuple[Dtype, ...] = (Dtype.BF16, Dtype.FP32)
"""Faults are judged with the FP32 pair that decides beside the 16-bit pair that is looked at."""

OpenScorer = Callable[[Dtype, bool], AbstractContextManager["TrainingSide"]]


class TrainingSide:
    """A loaded scorer as a fault made it, and what it says of itself; `edit` changes what it scores."""

    def __init__(self, scorer: Scorer, edit: Callable[[list[TokenSequence]], list[TokenSequence]] = list) -> None:
        self._scorer, self._edit = scorer, edit
        self.effective_settings = scorer.effective_settings()

    def score(self, batch: list[TokenSequence]) -> list[ScoredSequence]:
        return self._scorer.score_batch(self._edit(batch))

    def agreement(self, sequences: list[TokenSequence]) -> dict[str, Any]:
        """The setting of a reference that says whether it agrees with itself: the product's test without its cached and
        shorter passes, which take longer than a fault does.
        """
        rows = repeated_rows(sequences, 2)
        first, again = (
            np.concatenate([self.score([sequences[row]])[0].logprobs for row in rows]).astype(np.float64)
            for _ in range(2)
        )
        return {AGREEMENT: {"num_tokens": first.size, "again_nats": float(np.median(np.abs(first - again)))}}


@dataclass(frozen=True)
class BenchRun:
    """A run of the lab, and the training path that its responses were scored by."""

    run: RunDirectory
    open_scorer: OpenScorer

    def conclude(self, see: Callable[[Manifest], Manifest]) -> Summary:
        """The summary of what `see` leaves of the manifest, as the product concludes a run: where a pair would be
        called a bug by its size, what rounding in FP32 does is measured first, on this training path.
        """
        manifest = self.run.read_manifest()
        summary = summarise(self.run, see(manifest))
        checks = sides_to_check(summary, see(manifest))
        return summarise(self.run, see(self._measure_rounding(manifest, checks))) if checks else summary

    def _measure_rounding(self, manifest: Manifest, checks: Sequence[str]) -> Manifest:
        """The manifest with these checks, whose legs are scored where no earlier check did."""
        with_checks = manifest.model_copy(update={"rounding_checks": [*manifest.rounding_checks, *checks]})
        stages = [stage for stage in plan_of(with_checks).stages if stage.name not in manifest.stages]
        assert all(isinstance(stage, ScoreStage) for stage in stages), "a check scores, and does nothing else"
        manifest.stages.update({stage.name: StageRecord(state="done") for stage in stages})
        _score(self.run, manifest, [stage for stage in stages if isinstance(stage, ScoreStage)], self.open_scorer)
        return with_checks


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
    stages = [stage for stage in plan_of(manifest).stages if isinstance(stage, ScoreStage)]
    _score(run, manifest, [stage for stage in stages if stage.side.rounded_to is None], open_scorer)
    run.summary_path.unlink(missing_ok=True)


def _score(run: RunDirectory, manifest: Manifest, stages: Sequence[ScoreStage], open_scorer: OpenScorer) -> None:
    """Write the legs of these stages, and their settings into the manifest."""
    legs = Legs(run, manifest.run_key)
    rollouts = read_table(run.rollouts_path, columns=["id", "sampler", "prompt_token_ids", "token_ids"])
    sequences = dict(zip(rollouts["id"].to_pylist(), sequences_of(rollouts), strict=True))
    samplers = rollouts["sampler"].to_pylist()
    for stage in stages:
        chosen = [sequence for sequence, by in zip(sequences.values(), samplers, strict=True) if by in stage.samplers]
        with open_scorer(stage.side.dtype, stage.side.role == "ref") as side:
            scored: list[ScoredSequence | None] = [None] * len(chosen)
            for rows in plan_batches([sequence.num_tokens for sequence in chosen], 8192):
                for row, start in zip(rows, scored_with_starts(side.score, [chosen[row] for row in rows]), strict=True):
                    scored[row] = start
            agreement = side.agreement(chosen) if stage.side.role == "ref" else {}
            manifest.stages[stage.name].effective_settings = {**side.effective_settings, **agreement}
        double = stage.side.dtype == Dtype.FP64
        legs.write(stage.leg, leg_table(chosen, [scores for scores in scored if scores is not None], double=double))
    run.write_manifest(manifest)
