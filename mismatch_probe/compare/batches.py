"""A stage's loop: skip the batches that are recorded, compute the others, record each whole, and say so."""

import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.events import BatchDone, StageDone, StageStarted, send_event
from mismatch_probe.compare.stages import LegStage
from mismatch_probe.records.parts import Parts
from mismatch_probe.records.rows import leg_table
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence

Done = tuple[dict[str, pa.Table], int]
"""The tables of a batch, and its response tokens."""
BatchWork = Callable[[list[int]], Done]
RoundWork = Callable[[list[list[int]]], list[Done]]


def skip(stage: str, why: str, events: Send) -> None:
    """Say that a stage has nothing to do, and why."""
    send_event(events, StageStarted(stage=stage, batches=0, batches_done=0))
    send_event(events, StageDone(stage=stage, skipped=True, note=why))


def run_batches(parts: Parts, stage: str, batches: Sequence[list[int]], work: BatchWork, events: Send) -> None:
    """Work through `batches` (lists of row numbers); `work` returns the tables of a batch and its response tokens.

    Raises:
        StorageError: a batch could not be recorded.
    """
    run_rounds(parts, stage, batches, lambda together: [work(rows) for rows in together], events, at_once=1)


def run_rounds(
    parts: Parts, stage: str, batches: Sequence[list[int]], work: RoundWork, events: Send, *, at_once: int
) -> None:
    """As `run_batches`, with `work` that takes `at_once` batches together and returns as much of each."""
    parts.open()
    pending = [number for number in range(len(batches)) if not parts.is_done(number)]
    send_event(events, StageStarted(stage=stage, batches=len(batches), batches_done=len(batches) - len(pending)))
    pa.array([])  # pyarrow imports pandas at its first conversion, which is no work of the first batch
    for first in range(0, len(pending), at_once):
        start = time.monotonic()
        together = pending[first : first + at_once]
        done = work([batches[number] for number in together])
        for number, (tables, tokens) in zip(together, done, strict=True):
            parts.write(number, tables)
            now = time.monotonic()
            seconds, start = now - start, now
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
    """`run_batches` with what `score` says of a batch of the sequences, as a leg."""

    def each(together: list[list[TokenSequence]]) -> list[list[ScoredSequence]]:
        return [score(batch) for batch in together]

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
    """As `run_scores`, with `score` that takes `at_once` batches together; in FP64 where it is `double`."""

    def work(together: list[list[int]]) -> list[Done]:
        asked = [[sequences[row] for row in rows] for rows in together]
        return [
            ({stage.leg: leg_table(batch, scored, double=double)}, sum(len(one.token_ids) for one in batch))
            for batch, scored in zip(asked, score(asked), strict=True)
        ]

    run_rounds(run.parts(stage.name, stage.outputs), stage.name, batches, work, events, at_once=at_once)
