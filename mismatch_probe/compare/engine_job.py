"""The job of one engine's side: start the engine once, sample, replay the same ids, look closer at a few."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.batches import run_batches, skip
from mismatch_probe.compare.events import EffectiveSettings, RequestsDone, send_event
from mismatch_probe.compare.plan import PlannedJob, fixed_batches, model_length, sample_requests
from mismatch_probe.compare.prompt_starts import scored_with_starts
from mismatch_probe.compare.routing import record_routing, routed
from mismatch_probe.compare.stages import (
    DecodeAloneStage,
    DistributionsStage,
    EngineFloorStage,
    EngineRoutingStage,
    LegStage,
    ReplayStage,
    SampleStage,
)
from mismatch_probe.compare.subsample import DECODED_ALONE, LONGEST_REPEATED, compared_positions, repeated_rows
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.self_checks import decoded_alone, scored_alone
from mismatch_probe.engines.start import start_engine
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.rows import leg_table, prompts_of, rollouts_table, sequences_of
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt, TokenSequence
from mismatch_probe.records.tables import DISTRIBUTIONS, read_table

_NUMBERS_PER_BATCH: Final = 2**20
_TOLD_EVERY_SECONDS: Final = 1.0


def run_engine(run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send) -> None:
    """Run the job's stages on one engine.

    Raises:
        EngineError: the engine cannot start or does not deliver.
        StorageError: a batch could not be recorded.
    """
    settings, side = manifest.settings, job.stages[0].side
    prompts = prompts_of(read_table(run.prompts_path))
    assert side.engine is not None
    with start_engine(
        manifest.identity_of(side).folder,
        side.dtype,
        side.engine,
        settings.sampling,
        max_model_len=model_length(prompts, settings, manifest.model.context_length),
        trust_remote_code=side.model.trust_remote_code,
        seed=settings.sampling.seed,
    ) as engine:
        effective = engine.effective_settings()
        for recorded in (manifest.stages[stage.name].effective_settings for stage in job.stages):
            if recorded:
                engine.require_same_policy(recorded)
        for stage in job.stages:
            if manifest.stages[stage.name].state == "skipped":
                continue
            if not isinstance(stage, DistributionsStage) and _is_recorded(run, stage):
                continue
            send_event(events, EffectiveSettings(stage=stage.name, settings=effective))
            engine.on_finished = _told_now_and_then(stage.name, events)
            if isinstance(stage, SampleStage):
                _sample(run, manifest, stage, prompts, engine, events)
            elif isinstance(stage, ReplayStage):
                _replay(run, manifest, stage, prompts, engine, events)
            elif isinstance(stage, EngineFloorStage):
                _replay_again(run, manifest, stage, prompts, engine, events)
            elif isinstance(stage, DecodeAloneStage):
                _decode_alone(run, manifest, stage, prompts, engine, events)
            elif isinstance(stage, EngineRoutingStage):
                _routing(run, manifest, stage, prompts, engine, events)
            elif isinstance(stage, DistributionsStage):
                _distributions(run, manifest, stage, prompts, engine, events)


def _told_now_and_then(stage: str, events: Send) -> Callable[[int, int], None]:
    told = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TOLD_EVERY_SECONDS:
            told = time.monotonic()
            send_event(events, RequestsDone(stage=stage, done=done, of=of))

    return tell


def _is_recorded(run: RunDirectory, stage: LegStage) -> bool:
    """Whether all that a stage gives is there; sampling gives the responses besides its leg."""
    return run.leg_path(stage.leg).exists() and (not isinstance(stage, SampleStage) or run.rollouts_path.exists())


def _batches(manifest: Manifest, prompts: list[EncodedPrompt]) -> list[list[int]]:
    settings = manifest.settings
    assert settings.engine.batch_sequences is not None, "resolved when the run was made"
    return fixed_batches(len(prompts) * settings.sampling.samples_per_prompt, settings.engine.batch_sequences)


def _sample(
    run: RunDirectory,
    manifest: Manifest,
    stage: SampleStage,
    prompts: list[EncodedPrompt],
    engine: Engine,
    events: Send,
) -> None:
    requests = sample_requests(prompts, manifest.settings.sampling, stage.side)

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [requests[row] for row in rows]
        sampled = engine.sample(batch, manifest.settings.sampling)
        tables = {
            "rollouts": rollouts_table(batch, sampled, stage.side.sampler),
            stage.leg: leg_table([sample.sequence for sample in sampled], [sample.scores for sample in sampled]),
        }
        return tables, sum(len(sample.sequence.token_ids) for sample in sampled)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, _batches(manifest, prompts), work, events)


def _replay(
    run: RunDirectory,
    manifest: Manifest,
    stage: ReplayStage,
    prompts: list[EncodedPrompt],
    engine: Engine,
    events: Send,
) -> None:
    batches = _batches(manifest, prompts)
    sequences = _sampled_sequences(run, SampleStage(stage.side), len(batches))

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [sequences[row] for row in rows]
        scored = scored_with_starts(engine.replay, batch)
        return {stage.leg: leg_table(batch, scored)}, sum(len(sequence.token_ids) for sequence in batch)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, batches, work, events)


def _replay_again(
    run: RunDirectory,
    manifest: Manifest,
    stage: EngineFloorStage,
    prompts: list[EncodedPrompt],
    engine: Engine,
    events: Send,
) -> None:
    """A few of the responses, each in a batch of its own."""
    sequences = _sampled_sequences(run, SampleStage(stage.side), len(_batches(manifest, prompts)))
    chosen = [sequences[row] for row in repeated_rows(sequences, manifest.settings.floors.num_sequences)]
    if not chosen:
        skip(stage.name, f"every response is longer than {LONGEST_REPEATED} tokens with its prompt", events)
        return
    cached = stage.change == "cached"
    if cached:
        block = engine.effective_settings()["block_size"]
        chosen = [sequence for sequence in chosen if len(sequence.prompt_token_ids) > block]
        if not chosen:
            skip(stage.name, f"no prompt fills a block of the prefix cache, which has {block} tokens", events)
            return

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [chosen[row] for row in rows]
        scored = [replay.scores for replay in engine.replay_cached(batch)] if cached else scored_alone(engine, batch)
        return {stage.leg: leg_table(batch, scored)}, sum(len(sequence.token_ids) for sequence in batch)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, fixed_batches(len(chosen), len(chosen)), work, events)


def _decode_alone(
    run: RunDirectory,
    manifest: Manifest,
    stage: DecodeAloneStage,
    prompts: list[EncodedPrompt],
    engine: Engine,
    events: Send,
) -> None:
    """The first tokens of a few of the responses sampled again, each alone; NaN from where they come out otherwise."""
    sampled = SampleStage(stage.side)
    if manifest.stages[sampled.name].state == "skipped":
        skip(stage.name, manifest.stages[sampled.name].note, events)
        return
    sequences = _sampled_sequences(run, sampled, len(_batches(manifest, prompts)))
    chosen = [sequences[row] for row in repeated_rows(sequences, manifest.settings.floors.num_sequences)]
    if not chosen:
        skip(stage.name, f"every response is longer than {LONGEST_REPEATED} tokens with its prompt", events)
        return
    sampling = manifest.settings.sampling
    requests = {request.id: request for request in sample_requests(prompts, sampling, stage.side)}
    first = sampling.model_copy(update={"max_new_tokens": min(sampling.max_new_tokens, DECODED_ALONE)})

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [chosen[row] for row in rows]
        scored = decoded_alone(engine, [requests[sequence.id] for sequence in batch], first, batch)
        return {stage.leg: leg_table(batch, scored)}, sum(int(np.isfinite(scores.logprobs).sum()) for scores in scored)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, fixed_batches(len(chosen), 1), work, events)


def _routing(
    run: RunDirectory,
    manifest: Manifest,
    stage: EngineRoutingStage,
    prompts: list[EncodedPrompt],
    engine: Engine,
    events: Send,
) -> None:
    """The experts of a few of the responses' tokens; skipped where the engine cannot tell them."""
    sequences = _sampled_sequences(run, SampleStage(stage.side), len(_batches(manifest, prompts)))
    chosen = routed(sequences, manifest)
    if not chosen:
        skip(stage.name, f"every response is longer than {LONGEST_REPEATED} tokens with its prompt", events)
        return
    record_routing(run, stage, chosen, engine.routing, events)


def _distributions(
    run: RunDirectory,
    manifest: Manifest,
    stage: DistributionsStage,
    prompts: list[EncodedPrompt],
    engine: Engine,
    events: Send,
) -> None:
    sequences = _sampled_sequences(run, SampleStage(stage.side), len(_batches(manifest, prompts)))
    chosen = compared_positions(sequences, manifest.settings.full_vocabulary.positions, engine.vocab_size)
    if not chosen:
        skip(stage.name, "there is no position to compare", events)
        return

    def work(numbers: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [(sequences[row], position) for row, position in (chosen[number] for number in numbers)]
        rows = engine.distributions(
            [[*sequence.prompt_token_ids, *sequence.token_ids[:position]] for sequence, position in batch]
        )
        ids, positions = [sequence.id for sequence, _ in batch], [position for _, position in batch]
        columns = {"id": ids, "position": positions, "logprobs": list(rows)}
        return {"distributions": pa.table(columns, schema=DISTRIBUTIONS)}, len(batch)

    batches = fixed_batches(len(chosen), max(1, _NUMBERS_PER_BATCH // engine.vocab_size))
    run_batches(run.parts(stage.name, stage.outputs), stage.name, batches, work, events)


def _sampled_sequences(run: RunDirectory, stage: SampleStage, num_batches: int) -> list[TokenSequence]:
    """The responses of a stage: recorded with those of the other engines, or still as parts."""
    if run.rollouts_path.exists():
        rollouts = read_table(run.rollouts_path)
        recorded = rollouts.filter(pc.equal(rollouts["sampler"], stage.side.sampler))
        if recorded.num_rows:
            return sequences_of(recorded)
    return sequences_of(run.parts(stage.name, stage.outputs).read(num_batches, "rollouts"))
