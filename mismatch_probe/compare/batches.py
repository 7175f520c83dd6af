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

BatchWork = Callable[[list[int]], tuple[dict[str, pa.Table], int]]


def skip(stage: str, why: str, events: Send) -> None:
    """Say that a stage has nothing to do, and why."""
    send_event(events, StageStarted(stage=stage, batches=0, batches_done=0))
    send_event(events, StageDone(stage=stage, skipped=True, note=why))


def run_batches(parts: Parts, stage: str, batches: Sequence[list[int]], work: BatchWork, events: Send) -> None:
    """Work through `batches` (lists of row numbers); `work` returns the tables of a batch and its response tokens.

    Raises:
        StorageError: a batch could not be recorded.
    """
    parts.open()
    pending = [number for number in range(len(batches)) if not parts.is_done(number)]
    send_event(events, StageStarted(stage=stage, batches=len(batches), batches_done=len(batches) - len(pending)))
    pa.array([])  # pyarrow imports pandas at its first conversion, which is no work of the first batch
    for number in pending:
        start = time.monotonic()
        tables, tokens = work(batches[number])
        parts.write(number, tables)
        seconds = time.monotonic() - start
        send_event(events, BatchDone(stage=stage, sequences=len(batches[number]), tokens=tokens, seconds=seconds))
    send_event(events, StageDone(stage=stage))


def run_scores(
    run: RunDirectory,
    stage: LegStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    score: Callable[[list[TokenSequence]], list[ScoredSequence]],
    events: Send,
    *,
    double: bool = False,
) -> None:
    """`run_batches` with what `score` says of a batch of the sequences, as a leg; in FP64 where it is `double`."""

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [sequences[row] for row in rows]
        table = leg_table(batch, score(batch), double=double)
        return {stage.leg: table}, sum(len(sequence.token_ids) for sequence in batch)

    run_batches(run.parts(stage.name, stage.outputs), stage.name, batches, work, events)
