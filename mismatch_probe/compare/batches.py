"""The work of a stage, batch by batch: recorded batches are skipped; each new one is recorded and announced."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.cost.roofline import ProcessName
from mismatch_probe.compare.stages import LegStage
from mismatch_probe.records.run_directory import Parts, RunDirectory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.tables import leg_table


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobStarted(Event):
    """A process begins to load the model of its first stage."""

    kind: Literal["job_started"] = "job_started"
    process: ProcessName
    stages: list[str]


class StageStarted(Event):
    kind: Literal["stage_started"] = "stage_started"
    stage: str
    batches: int
    batches_done: int


class EffectiveSettings(Event):
    """The settings of a stage, read back from the engine or model that runs."""

    kind: Literal["effective_settings"] = "effective_settings"
    stage: str
    settings: dict[str, Any]


class RequestsDone(Event):
    """The progress of a batch, which does not show the remaining time: the longest requests end late."""

    kind: Literal["requests_done"] = "requests_done"
    stage: str
    done: int
    of: int


class LayersDone(Event):
    """The progress of a reference that takes all batches through one layer after the other."""

    kind: Literal["layers_done"] = "layers_done"
    stage: str
    done: int
    of: int


class BatchDone(Event):
    kind: Literal["batch_done"] = "batch_done"
    stage: str
    sequences: int
    tokens: int
    seconds: float


class StageDone(Event):
    kind: Literal["stage_done"] = "stage_done"
    stage: str
    skipped: bool = False
    note: str = ""


AnyEvent = Annotated[
    JobStarted | StageStarted | EffectiveSettings | RequestsDone | LayersDone | BatchDone | StageDone,
    Field(discriminator="kind"),
]

parse: Final[Callable[[Any], AnyEvent]] = TypeAdapter(AnyEvent).validate_python
"""The event of a message."""


def send_event(events: Send, event: Event) -> None:
    events(event.model_dump(mode="json"))


BatchOutcome = tuple[dict[str, pa.Table], int]
"""The tables of a batch and its number of response tokens."""
BatchWork = Callable[[list[int]], BatchOutcome]
RoundWork = Callable[[list[list[int]]], list[BatchOutcome]]


def skip(stage: str, why: str, events: Send) -> None:
    """Announce that a stage has nothing to do, with the reason."""
    send_event(events, StageStarted(stage=stage, batches=0, batches_done=0))
    send_event(events, StageDone(stage=stage, skipped=True, note=why))


def run_batches(parts: Parts, stage: str, batches: Sequence[list[int]], work: BatchWork, events: Send) -> None:
    """Work through `batches` (lists of row numbers); `work` returns the tables of a batch and its response tokens."""
    run_rounds(parts, stage, batches, lambda group: [work(rows) for rows in group], events, at_once=1)


def run_rounds(
    parts: Parts, stage: str, batches: Sequence[list[int]], work: RoundWork, events: Send, *, at_once: int
) -> None:
    """`run_batches` where `work` takes `at_once` batches together and returns the outcome of each."""
    parts.open()
    pending = [number for number in range(len(batches)) if not parts.is_done(number)]
    send_event(events, StageStarted(stage=stage, batches=len(batches), batches_done=len(batches) - len(pending)))
    pa.array([])  # pyarrow imports pandas at its first conversion, which is no work of the first batch
    for first in range(0, len(pending), at_once):
        start = time.monotonic()
        batch_numbers = pending[first : first + at_once]
        outcomes = work([batches[number] for number in batch_numbers])
        for number, (tables, tokens) in zip(batch_numbers, outcomes, strict=True):
            parts.write(number, tables)
            time_of_batch = time.monotonic()
            seconds, start = time_of_batch - start, time_of_batch
            send_event(events, BatchDone(stage=stage, sequences=len(batches[number]), tokens=tokens, seconds=seconds))
    send_event(events, StageDone(stage=stage))


def run_scores(
    run: RunDirectory,
    stage: LegStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    score: Callable[[list[TokenSequence]], list[ScoredSequence]],
    events: Send,
) -> None:
    """`run_batches` that records the scores of `score` as a leg."""

    def each(groups: list[list[TokenSequence]]) -> list[list[ScoredSequence]]:
        return [score(batch) for batch in groups]

    run_scores_together(run, stage, sequences, batches, each, events, at_once=1)


def run_scores_together(
    run: RunDirectory,
    stage: LegStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    score: Callable[[list[list[TokenSequence]]], list[list[ScoredSequence]]],
    events: Send,
    *,
    at_once: int,
    double: bool = False,
) -> None:
    """`run_scores` where `score` takes `at_once` batches together; a `double` leg is in FP64."""

    def work(groups: list[list[int]]) -> list[BatchOutcome]:
        batches = [[sequences[row] for row in rows] for rows in groups]
        return [
            ({stage.leg: leg_table(batch, scores, double=double)}, sum(len(sequence.token_ids) for sequence in batch))
            for batch, scores in zip(batches, score(batches), strict=True)
        ]

    run_rounds(run.parts(stage.name, stage.outputs), stage.name, batches, work, events, at_once=at_once)
