"""The job of one engine's side: start the engine once, sample, replay the same ids, and repeat a few responses.

An engine that several ranks hold together runs with vLLM's external launcher: all ranks make the same calls, and vLLM
finds their process group and divides the model over it, on one machine or several.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import RankPlace
from mismatch_probe.compare.plan import (
    BatchWork,
    EffectiveSettings,
    PlannedJob,
    RequestsDone,
    fixed_batches,
    model_length,
    run_batches,
    run_scores,
    sample_requests,
    send_event,
    skip,
)
from mismatch_probe.compare.stages import (
    DECODED_ALONE,
    TOO_LONG,
    DecodeAloneStage,
    DistributionsStage,
    EngineFloorStage,
    EngineRoutingStage,
    ReplayStage,
    SampleStage,
    Stage,
    compared_positions,
    repeated_rows,
    scored_with_starts,
)
from mismatch_probe.compare.subsamples import record_routing, responses_with_experts
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.base import CachedReplay, Engine, decoded_alone, scored_alone
from mismatch_probe.engines.start import start_engine
from mismatch_probe.errors import UsageError
from mismatch_probe.images import images_of
from mismatch_probe.records.legs import SequenceRouting, read_prompts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import (
    EncodedPrompt,
    FloatArray,
    SampledSequence,
    SampleRequest,
    ScoredSequence,
    TokenSequence,
)
from mismatch_probe.records.tables import DISTRIBUTIONS, leg_table, prompts_of, read_table, rollouts_table, sequences_of
from mismatch_probe.training_path import rank_group

if TYPE_CHECKING:
    import torch


_NUMBERS_PER_BATCH: Final = 2**20
T = TypeVar("T")
_TOLD_EVERY_SECONDS: Final = 1.0


def run_engine(
    run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send, start: Callable[..., Engine] = start_engine
) -> None:
    """Run the job's stages on one engine, started with the arguments of `start_engine`."""
    settings, side = manifest.settings, job.stages[0].side
    prompts = prompts_of(read_prompts(run, manifest.run_key))
    assert side.engine is not None
    with start(
        manifest.identity_of(side).folder,
        side.dtype,
        side.engine,
        settings.sampling,
        max_model_len=model_length(prompts, settings, manifest.model.context_length),
        num_sequences=len(prompts) * settings.sampling.samples_per_prompt,
        trust_remote_code=side.model.trust_remote_code,
        seed=settings.sampling.seed,
        num_images=max((len(images.paths) for images in images_of(prompts)), default=0),
    ) as engine:
        engine.look_at(prompts)
        effective = engine.effective_settings()
        for settings_of_stage in (manifest.stages[stage.name].effective_settings for stage in job.stages):
            if settings_of_stage:
                engine.require_same_policy(settings_of_stage)
        stages = _EngineStages(run, manifest, side, prompts, engine, events)
        for stage in job.stages:
            if manifest.stages[stage.name].state == "skipped" or stages.is_recorded(stage):
                continue
            send_event(events, EffectiveSettings(stage=stage.name, settings=effective))
            engine.on_finished = _progress_sender(stage.name, events)
            stages.run(stage)


def _progress_sender(stage: str, events: Send) -> Callable[[int, int], None]:
    last_time = time.monotonic()

    def send_progress(num_done: int, of: int) -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= _TOLD_EVERY_SECONDS:
            last_time = time.monotonic()
            send_event(events, RequestsDone(stage=stage, done=num_done, of=of))

    return send_progress


class _EngineStages:
    """The stages of one side, on its engine."""

    def __init__(
        self,
        run: RunDirectory,
        manifest: Manifest,
        side: Side,
        prompts: list[EncodedPrompt],
        engine: Engine,
        events: Send,
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._settings = manifest.settings
        self._engine = engine
        self._events = events
        self._prompts = prompts
        self._sampling = SampleStage(side)
        self._requests = sample_requests(prompts, manifest.settings.sampling, side)
        size = manifest.settings.engine.batch_sequences
        assert size is not None, "resolved when the run was made"
        self._batch_size = size
        self._sampling_batches = fixed_batches(len(self._requests), size)

    def is_recorded(self, stage: Stage) -> bool:
        """Whether the outputs of a stage are recorded; sampling also gives the responses."""
        if isinstance(stage, DistributionsStage) or not self._run.leg_path(stage.leg).exists():
            return False
        return not isinstance(stage, SampleStage) or self._run.rollouts_path.exists()

    def run(self, stage: Stage) -> None:
        match stage:
            case SampleStage():
                self._run_sampling(stage)
            case ReplayStage():
                score, sequences = partial(scored_with_starts, self._engine.replay), self._responses_of_side()
                batches = fixed_batches(len(sequences), self._batch_size)  # of a log any number to a prompt
                run_scores(self._run, stage, sequences, batches, score, self._events)
            case EngineFloorStage():
                self._run_floor_replay(stage)
            case DecodeAloneStage():
                self._run_decoding_alone(stage)
            case EngineRoutingStage():
                if responses := self._rows_or_skip(
                    stage, responses_with_experts(self._responses_of_side(), self._manifest)
                ):
                    record_routing(self._run, stage, responses, self._engine.routing, self._events)
            case DistributionsStage():
                self._run_distributions(stage)

    def _run_sampling(self, stage: SampleStage) -> None:
        def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
            batch = [self._requests[row] for row in rows]
            responses = self._engine.sample(batch, self._settings.sampling)
            tables = {
                "rollouts": rollouts_table(batch, responses, stage.side.sampler),
                stage.leg: leg_table(
                    [sample.sequence for sample in responses], [sample.scores for sample in responses]
                ),
            }
            return tables, sum(len(sample.sequence.token_ids) for sample in responses)

        self._work_through(stage, self._sampling_batches, work)

    def _run_floor_replay(self, stage: EngineFloorStage) -> None:
        """Score a few of the responses, each in a batch of its own."""
        responses = self._rows_or_skip(stage, self._repeated_responses())
        if not responses:
            return
        is_cached = stage.change == "cached"
        if is_cached:
            block = self._engine.effective_settings()["block_size"]
            no_block = f"no prompt fills a block of the prefix cache, which has {block} tokens"
            responses = self._rows_or_skip(
                stage, [row for row in responses if len(row.prompt_token_ids) > block], no_block
            )

        def score(batch: list[TokenSequence]) -> list[ScoredSequence]:
            if is_cached:
                return [replay.scores for replay in self._engine.replay_cached(batch)]
            return scored_alone(self._engine, batch)

        if responses:
            run_scores(self._run, stage, responses, fixed_batches(len(responses), len(responses)), score, self._events)

    def _run_decoding_alone(self, stage: DecodeAloneStage) -> None:
        """Sample the first tokens of a few responses again, each alone; NaN from the first token that differs."""
        record = self._manifest.stages[self._sampling.name]
        if record.state == "skipped":
            skip(stage.name, record.note, self._events)
            return
        responses = self._rows_or_skip(stage, self._repeated_responses())
        requests = {request.id: request for request in self._requests}
        most = min(self._settings.sampling.max_new_tokens, DECODED_ALONE)
        first = self._settings.sampling.model_copy(update={"max_new_tokens": most})

        def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
            batch = [responses[row] for row in rows]
            scored_sequences = decoded_alone(self._engine, [requests[sequence.id] for sequence in batch], first, batch)
            num_tokens = sum(int(np.isfinite(scores.logprobs).sum()) for scores in scored_sequences)
            return {stage.leg: leg_table(batch, scored_sequences)}, num_tokens

        if responses:
            self._work_through(stage, fixed_batches(len(responses), 1), work)

    def _run_distributions(self, stage: DistributionsStage) -> None:
        sequences, vocab_size = self._responses_of_side(), self._engine.vocab_size
        positions_of_rows = compared_positions(sequences, self._settings.full_vocabulary.positions, vocab_size)

        def work(numbers: list[int]) -> tuple[dict[str, pa.Table], int]:
            batch = [(sequences[row], position) for row, position in (positions_of_rows[number] for number in numbers)]
            rows = self._engine.distributions(
                [[*sequence.prompt_token_ids, *sequence.token_ids[:position]] for sequence, position in batch]
            )
            ids, positions = [sequence.id for sequence, _ in batch], [position for _, position in batch]
            columns = {"id": ids, "position": positions, "logprobs": list(rows)}
            return {"distributions": pa.table(columns, schema=DISTRIBUTIONS)}, len(batch)

        if self._rows_or_skip(stage, positions_of_rows, "there is no position to compare"):
            self._work_through(
                stage, fixed_batches(len(positions_of_rows), max(1, _NUMBERS_PER_BATCH // vocab_size)), work
            )

    def _work_through(self, stage: Stage, batches: list[list[int]], work: BatchWork) -> None:
        run_batches(self._run.parts(stage.name, stage.outputs), stage.name, batches, work, self._events)

    def _rows_or_skip(self, stage: Stage, rows: Sequence[T], none_because: str = TOO_LONG) -> Sequence[T]:
        """The rows; the stage is skipped where there are none."""
        if not rows:
            skip(stage.name, none_because, self._events)
        return rows

    def _repeated_responses(self) -> list[TokenSequence]:
        sequences = self._responses_of_side()
        return [sequences[row] for row in repeated_rows(sequences, self._settings.floors.num_sequences)]

    def _responses_of_side(self) -> list[TokenSequence]:
        """The side's responses, which are recorded with those of the other engines, or still in parts."""
        if self._run.rollouts_path.exists():
            rollouts = read_table(self._run.rollouts_path)
            own_rollouts = rollouts.filter(pc.equal(rollouts["sampler"], self._sampling.side.sampler))
            if own_rollouts.num_rows:
                return sequences_of(own_rollouts, self._prompts)
        parts = self._run.parts(self._sampling.name, self._sampling.outputs)
        return sequences_of(parts.read(len(self._sampling_batches), "rollouts"), self._prompts)


def run_engine_over_ranks(
    run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send, place: RankPlace
) -> None:
    """`run_engine` on the first of several ranks that hold the engine together; the others follow it."""
    rank_group.join(place)
    run_engine(run, manifest, job, events, RanksEngine)


class RanksEngine(rank_group.HeldByRanks[Engine], Engine):
    """The engine on the first rank; the others are in `rank_group.follow_first`. All must have joined the group."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Arguments and errors are those of `start_engine`."""
        super().__init__(start_engine, *arguments, **keywords)

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        responses: list[SampledSequence] = self._on_every_rank("sample", requests, sampling)
        return responses

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        scores: list[ScoredSequence] = self._on_every_rank("replay", sequences)
        return scores

    def replay_cached(self, sequences: Sequence[TokenSequence]) -> list[CachedReplay]:
        replays: list[CachedReplay] = self._on_every_rank("replay_cached", sequences)
        return replays

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        routing: list[SequenceRouting] = self._on_every_rank("routing", sequences)
        return routing

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        log_probs: FloatArray = self._on_every_rank("distributions", contexts)
        return log_probs

    def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        raise UsageError("a comparison's engine over ranks keeps the weights it was started with")

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def require_same_policy(self, digests: Mapping[str, Any]) -> None:
        self._model.require_same_policy(digests)

    def effective_settings(self) -> dict[str, Any]:
        return self._model.effective_settings()

    def _on_every_rank(self, method: str, *arguments: Any) -> Any:
        self._model.on_finished = self.on_finished
        return super()._on_every_rank(method, *arguments)
