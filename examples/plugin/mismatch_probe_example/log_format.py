"""A log format: JSON lines with the token ids of a prompt (`q`), a response (`a`) and log-probs (`lp`, `train_lp`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from mismatch_probe.logs import Format, Holds, Tell
from mismatch_probe.logs.row import read_lines
from mismatch_probe.records.sequences import LoggedResponse


def _responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for row in read_lines(path, tell):
        token_ids = row.ids("a")
        yield LoggedResponse(
            where=row.where,
            prompt_token_ids=row.ids("q"),
            token_ids=token_ids,
            sampled=np.ones(token_ids.size, np.bool_),
            log_mu=row.optional_numbers("lp", token_ids.size),
            log_pi=row.optional_numbers("train_lp", token_ids.size),
        )


EXAMPLE: Final = Format(
    name="example",
    title="the example plug-in's log",
    holds=Holds.BOTH_SIDES,
    fits=lambda look: look.lines_with("q", "a", "lp"),
    responses=_responses,
)
