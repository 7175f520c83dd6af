"""The job of the training path: pi in each dtype and the reference score the recorded ids, one model at a time."""

from itertools import groupby
from pathlib import Path

import pyarrow as pa

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.addition import is_recorded, samplers_left
from mismatch_probe.compare.batches import run_batches, skip
from mismatch_probe.compare.events import EffectiveSettings, send_event
from mismatch_probe.compare.full_vocabulary import compare_distributions
from mismatch_probe.compare.plan import PlannedJob, fixed_batches
from mismatch_probe.compare.prompt_starts import scored_with_starts
from mismatch_probe.compare.routing import record_routing, routed
from mismatch_probe.compare.stages import FloorStage, FullVocabularyStage, RoutingStage, ScoreStage, TrainingStage
from mismatch_probe.compare.subsample import LONGEST_REPEATED, repeated_rows
from mismatch_probe.config.model import Attention
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.rows import leg_table, sequences_of
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import read_table
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.loading import load_config, sdpa_leaves_out
from mismatch_probe.training_path.scorer import Scorer
from mismatch_probe.training_path.weight_cast import held_weights, measure_weight_cast


def run_scoring(run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send) -> None:
    """Score every leg of the job that is not recorded yet.

    Raises:
        EngineError: a model cannot be loaded or run.
        StorageError: a batch could not be recorded.
    """
    rollouts = read_table(run.rollouts_path, columns=["id", "sampler", "prompt_token_ids", "token_ids"])
    by_sampler: dict[str, list[TokenSequence]] = {}
    for sampler, sequence in zip(rollouts["sampler"].to_pylist(), sequences_of(rollouts), strict=True):
        by_sampler.setdefault(sampler, []).append(sequence)
    pending = [
        stage
        for stage in job.stages
        if isinstance(stage, TrainingStage)
        and manifest.stages[stage.name].state != "skipped"
        and not is_recorded(run, manifest, stage)
    ]
    for side, stages in groupby(pending, key=lambda stage: stage.model):
        _run_stages(run, manifest, side, list(stages), by_sampler, events)


def _run_stages(
    run: RunDirectory,
    manifest: Manifest,
    side: Side,
    stages: list[TrainingStage],
    by_sampler: dict[str, list[TokenSequence]],
    events: Send,
) -> None:
    """Work through stages that need the same model."""
    folder = Path(manifest.identity_of(side).folder)
    if side.rounded_to is not None and _rounding_is_exact(folder, side):
        _skip(stages, f"every weight is exactly representable in {side.rounded_to}: rounding changes nothing", events)
        return
    other_attention = stages[0].attention if isinstance(stages[0], FloorStage) else None
    left_out = _left_out_by(other_attention, folder, side)
    if left_out is not None:
        _skip(stages, f"{other_attention} attention leaves out {left_out}", events)
        return
    try:
        scorer = _load(manifest, side)
    except (UsageError, EngineError) as error:
        if other_attention is None:
            raise
        _skip(stages, f"the model does not run with {other_attention} attention: {error}", events)
        return
    with scorer:
        for stage in stages:
            send_event(events, EffectiveSettings(stage=stage.name, settings=scorer.effective_settings()))
            if isinstance(stage, FullVocabularyStage):
                compare_distributions(run, manifest, stage, by_sampler[stage.mu.sampler], scorer, events)
            elif isinstance(stage, RoutingStage):
                _routing(run, manifest, stage, by_sampler, scorer, events)
            elif isinstance(stage, FloorStage):
                _score_alone(run, manifest, stage, by_sampler, scorer, events)
            else:
                _score(run, manifest, stage, by_sampler, scorer, events)


def _left_out_by(attention: Attention | None, folder: Path, side: Side) -> str | None:
    """What another attention than the side's own would drop, which is no floor of it."""
    if attention != "sdpa":
        return None
    return sdpa_leaves_out(load_config(folder, trust_remote_code=side.model.trust_remote_code))


def _load(manifest: Manifest, side: Side) -> Scorer:
    assert side.training is not None
    return Scorer.load(
        manifest.identity_of(side).folder,
        side.dtype,
        side.training,
        reference=side.role == "ref",
        rounded_to=side.rounded_to,
        temperature=manifest.settings.sampling.temperature,
        trust_remote_code=side.model.trust_remote_code,
    )


def _score(
    run: RunDirectory,
    manifest: Manifest,
    stage: ScoreStage,
    by_sampler: dict[str, list[TokenSequence]],
    scorer: Scorer,
    events: Send,
) -> None:
    left = samplers_left(run, stage)
    sequences = [sequence for sampler, sampled in by_sampler.items() if sampler in left for sequence in sampled]
    batches = plan_batches([sequence.num_tokens for sequence in sequences], manifest.settings.training.batch_tokens)

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [sequences[row] for row in rows]
        table = leg_table(batch, scored_with_starts(scorer.score_batch, batch), double=stage.side.dtype == Dtype.FP64)
        return {stage.leg: table}, sum(len(sequence.token_ids) for sequence in batch)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, batches, work, events)


def _score_alone(
    run: RunDirectory,
    manifest: Manifest,
    stage: FloorStage,
    by_sampler: dict[str, list[TokenSequence]],
    scorer: Scorer,
    events: Send,
) -> None:
    """A few responses of each sampler, each in a pass of its own."""
    most = manifest.settings.floors.num_sequences
    left = samplers_left(run, stage)
    chosen = [by_sampler[name][row] for name in left for row in repeated_rows(by_sampler[name], most)]
    if not chosen:
        skip(stage.name, f"every response is longer than {LONGEST_REPEATED} tokens with its prompt", events)
        return

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [chosen[row] for row in rows]
        table = leg_table(batch, scorer.score_batch(batch), double=stage.side.dtype == Dtype.FP64)
        return {stage.leg: table}, sum(len(sequence.token_ids) for sequence in batch)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, fixed_batches(len(chosen), 1), work, events)


def _routing(
    run: RunDirectory,
    manifest: Manifest,
    stage: RoutingStage,
    by_sampler: dict[str, list[TokenSequence]],
    scorer: Scorer,
    events: Send,
) -> None:
    """The experts of the tokens whose engine told its own; skipped where there are none."""
    left = samplers_left(run, stage)
    records = {mu.sampler: manifest.stages[mu.stage("routing")] for mu in stage.engines}
    told = [name for name in left if records[name].state != "skipped"]
    chosen = [sequence for name in told for sequence in routed(by_sampler[name], manifest)]
    if not chosen:
        skip(stage.name, next(records[name].note for name in left), events)
        return
    record_routing(run, stage, chosen, scorer.routing, events)


def _skip(stages: list[TrainingStage], why: str, events: Send) -> None:
    for stage in stages:
        skip(stage.name, why, events)


def _rounding_is_exact(folder: Path, side: Side) -> bool:
    assert side.training is not None
    assert side.rounded_to is not None
    weights = held_weights(folder, side.training)
    return weights is not None and measure_weight_cast(weights, side.rounded_to).is_exact
