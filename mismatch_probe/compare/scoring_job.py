"""The job of the training path: pi in each dtype and the reference score the recorded ids, one model at a time."""

from pathlib import Path
from typing import IO

import pyarrow as pa

from mismatch_probe.compare.batches import run_batches
from mismatch_probe.compare.events import EffectiveSettings, StageDone, StageStarted, send
from mismatch_probe.compare.plan import Job, ScoreStage
from mismatch_probe.compare.starts import scored_with_starts
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.rows import leg_table, sequences_of
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import read_table
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.scorer import Scorer
from mismatch_probe.training_path.weight_cast import measure_weight_cast, stored_weights


def run_scoring(run: RunDirectory, manifest: Manifest, job: Job, events: IO[str]) -> None:
    """Score every leg of the job that is not recorded yet.

    Raises:
        EngineError: a model cannot be loaded or run.
        StorageError: a batch could not be recorded.
    """
    rollouts = read_table(run.rollouts_path, columns=["id", "sampler", "prompt_token_ids", "token_ids"])
    samplers = rollouts["sampler"].to_pylist()
    sequences = sequences_of(rollouts)
    for stage in job.stages:
        assert isinstance(stage, ScoreStage)
        if run.leg_path(stage.leg).exists() or manifest.stages[stage.name].state == "skipped":
            continue
        chosen = [sequence for sequence, sampler in zip(sequences, samplers, strict=True) if sampler in stage.samplers]
        _score(run, manifest, stage, chosen, events)


def _score(
    run: RunDirectory, manifest: Manifest, stage: ScoreStage, sequences: list[TokenSequence], events: IO[str]
) -> None:
    settings = manifest.settings
    if stage.rounded_to is not None and _rounding_is_exact(Path(manifest.model.folder), stage.rounded_to):
        note = f"every weight is exactly representable in {stage.rounded_to}: rounding changes nothing"
        send(events, StageStarted(stage=stage.name, batches=0, batches_done=0))
        send(events, StageDone(stage=stage.name, skipped=True, note=note))
        return
    with Scorer.load(
        manifest.model.folder,
        stage.dtype,
        settings.training,
        reference=stage.reference,
        rounded_to=stage.rounded_to,
        temperature=settings.sampling.temperature,
        trust_remote_code=settings.model.trust_remote_code,
    ) as scorer:
        send(events, EffectiveSettings(stage=stage.name, settings=scorer.effective_settings()))
        batches = plan_batches([sequence.num_tokens for sequence in sequences], settings.training.batch_tokens)

        def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
            batch = [sequences[row] for row in rows]
            table = leg_table(batch, scored_with_starts(scorer.score_batch, batch), double=stage.dtype == "fp64")
            return {stage.leg: table}, sum(len(sequence.token_ids) for sequence in batch)

        run_batches(run, stage, batches, work, events)


def _rounding_is_exact(folder: Path, dtype: Dtype) -> bool:
    weights = stored_weights(folder)
    return weights is not None and measure_weight_cast(weights, dtype).is_exact
