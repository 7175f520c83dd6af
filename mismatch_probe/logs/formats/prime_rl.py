"""prime-rl: `token_exports/step_N/rank_R.jsonl`, one packed sequence a line; index i of a row is about token i.

The first token of a sequence has no log-prob: what stands there is a filler, or is about the sequence packed before.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from mismatch_probe.logs.findings import Tell
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import Look
from mismatch_probe.logs.row import read_lines, split_by_mask
from mismatch_probe.records.sequences import FloatArray, LoggedResponse

_SCHEMA: Final = 1
_STABLE: Final = "STABLE"


def _fits(look: Look) -> bool:
    return look.lines_with("schema_version", "token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")


def _responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for row in read_lines(path, tell):
        if row.whole("schema_version") != _SCHEMA:
            raise row.refusal(f"its schema_version is another than {_SCHEMA}, which is read")
        token_ids = row.ids("token_ids")
        length = token_ids.size
        own = row.flags("loss_mask", length)
        yield split_by_mask(
            where=row.where,
            token_ids=token_ids,
            own=own,
            sampled=own,
            log_mu=_without_first(row.numbers("inference_logprobs", length)),
            log_pi=_without_first(row.numbers("trainer_logprobs", length)),
            entropy_nats=row.optional_numbers("entropy", length),
            step=row.whole("step"),
        )


def _without_first(log_probs: FloatArray) -> FloatArray:
    log_probs = log_probs.copy()
    log_probs[:1] = np.nan
    return log_probs


def _step_of(path: Path) -> int | None:
    named = re.fullmatch(r"step_(\d{1,15})", path.parent.name)
    return int(named[1]) if named else None


def _complete(path: Path) -> bool | None:
    """prime-rl marks a step's folder once every rank has written all of it."""
    return None if _step_of(path) is None else (path.parent / _STABLE).exists()


PRIME_RL: Final = Format(
    name="prime_rl",
    title="prime-rl's token export",
    holds=Holds.BOTH_SIDES,
    fits=_fits,
    responses=_responses,
    step_of=_step_of,
    complete=_complete,
)
