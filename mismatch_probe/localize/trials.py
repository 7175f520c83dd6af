"""What each side gives with one part in FP32, on the same ids: scored with it, timed beside scoring without it."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from mismatch_probe.localize.workspace import TrialNotes, Workspace
from mismatch_probe.records.localize import Side
from mismatch_probe.records.rows import leg_table
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.tables import write_table

Score = Callable[[], list[ScoredSequence]]
InFP32 = Callable[[], AbstractContextManager[int]]
NOT_16_BIT: Final = "its weights are not 16-bit, so it has no part to compute in FP32"
_REPEATS: Final = 2


def try_parts(
    workspace: Workspace,
    side: Side,
    sequences: Sequence[TokenSequence],
    score: Score,
    parts: Mapping[str, InFP32],
    tell: Callable[[str], None],
) -> list[TrialNotes]:
    """Score with nothing in FP32, then with each part, and write a leg for each; `tell` hears how far that is."""
    tell("scoring with nothing in FP32")
    trials = [try_plain(workspace, side, sequences, score)]
    for number, (name, part) in enumerate(parts.items(), 1):
        tell(f"part {number} of {len(parts)} in FP32: {name}")
        trials.append(_tried(workspace, side, sequences, score, name, part))
    return trials


def try_plain(
    workspace: Workspace, side: Side, sequences: Sequence[TokenSequence], score: Score, name: str = ""
) -> TrialNotes:
    """Score with no part in FP32, as the side is or, with a name, as `score` runs it otherwise."""
    return _tried(workspace, side, sequences, score, name, lambda: nullcontext(0))


def _tried(
    workspace: Workspace,
    side: Side,
    sequences: Sequence[TokenSequence],
    score: Score,
    part: str,
    in_fp32: InFP32,
) -> TrialNotes:
    with in_fp32() as extra_bytes:
        seconds = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            scored = score()
            seconds.append(time.perf_counter() - begun)
    notes = TrialNotes(part=part, side=side, seconds=min(seconds), extra_bytes=extra_bytes)
    write_table(workspace.leg(notes.leg), leg_table(sequences, scored))
    return notes
