"""Parts of the engine in FP32, and replays that are cut in another way, on the responses that it sampled."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.vllm.fp32_parts import engine_part_in_fp32, engine_parts
from mismatch_probe.localize.interventions import ONE_AT_A_TIME
from mismatch_probe.localize.trials import InFP32, try_parts, try_plain
from mismatch_probe.localize.workspace import TrialNotes, Workspace
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence

_BATCH_SEQUENCES: Final = 64


def try_engine_parts(
    workspace: Workspace,
    engine: Engine,
    dtype: Dtype,
    sequences: Sequence[TokenSequence],
    tell: Callable[[str], None],
) -> list[TrialNotes]:
    """Replay with each part in FP32, of a 16-bit engine, and with every response in a pass of its own."""
    names = engine_parts(engine) if dtype.is_16_bit else []
    parts: dict[str, InFP32] = {name: partial(engine_part_in_fp32, engine, name) for name in names}
    trials = try_parts(workspace, "infer", sequences, partial(replay_in_batches, engine, sequences), parts, tell)
    alone = partial(replay_in_batches, engine, sequences, size=1)
    tell("each response alone")
    return [*trials, try_plain(workspace, "infer", sequences, alone, ONE_AT_A_TIME)]


def replay_in_batches(
    engine: Engine, sequences: Sequence[TokenSequence], *, size: int = _BATCH_SEQUENCES
) -> list[ScoredSequence]:
    batches = (sequences[start : start + size] for start in range(0, len(sequences), size))
    return [scores for batch in batches for scores in engine.replay(batch)]
