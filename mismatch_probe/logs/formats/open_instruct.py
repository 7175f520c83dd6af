"""open-instruct: `RUN_rollouts_NNNNNN.jsonl` of `--save_traces`, a response a line.

The log does not mark tokens of tools. In a response that called a tool, tokens with a log-prob of exactly 0 count as
the tool's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.row import Row, Tell, read_lines
from mismatch_probe.records.sequences import FloatArray, LoggedResponse


def _open_instruct_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for row in read_lines(path, tell):
        token_ids = row.ids("response_tokens")
        log_mu = row.optional_numbers("logprobs", token_ids.size)
        step = row.integer("step")
        yield LoggedResponse(
            where=row.where,
            prompt_token_ids=row.ids("prompt_tokens"),
            token_ids=token_ids,
            sampled=_is_sampled(row, log_mu, token_ids.size),
            log_mu=log_mu,
            step=step,
            group=f"{step}/{row.integer('prompt_idx')}",
            finish_reason=row.text("finish_reason"),
        )


def _is_sampled(row: Row, log_mu: FloatArray | None, length: int) -> npt.NDArray[np.bool_]:
    tool_calls = row.has("request_info") and row.inside("request_info").columns.get("tool_calleds")
    return np.ones(length, np.bool_) if log_mu is None or not tool_calls else log_mu != 0


OPEN_INSTRUCT: Final = Format(
    name="open_instruct",
    title="open-instruct's traces",
    holds=Holds.SAMPLER,
    fits=lambda look: look.lines_with("prompt_tokens", "response_tokens", "sample_idx", "prompt_idx", "logprobs"),
    responses=_open_instruct_responses,
    step_of=lambda path: None,
)
