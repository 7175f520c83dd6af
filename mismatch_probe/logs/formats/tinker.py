"""tinker-cookbook: `capture/sample.jsonl`, a sampling call a line with one or more samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.row import Row, Tell, read_lines
from mismatch_probe.records.sequences import LoggedResponse

_STEP: Final = "iteration"


def _tinker_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for call in read_lines(path, tell):
        if not call.has("samples"):  # it failed
            continue
        scope = call.inside("scope")
        temperature = call.inside("sampling_params").number("temperature") if call.has("sampling_params") else None
        for row in call.rows("samples"):
            token_ids = row.ids("tokens")
            yield LoggedResponse(
                where=row.where,
                prompt_token_ids=call.ids("prompt_tokens"),
                token_ids=token_ids,
                sampled=np.ones(token_ids.size, np.bool_),
                log_mu=row.optional_numbers("logprobs", token_ids.size),
                step=scope.integer(_STEP),
                weight_version=call.text("model_path"),
                temperature=temperature,
                group=call.where,
                trajectory=_trajectory(scope),
                finish_reason=row.text("stop_reason"),
            )


def _trajectory(scope: Row) -> str | None:
    """Calls for one trajectory of a group are its turns."""
    if not scope.has("traj_idx"):
        return None
    return "/".join(scope.text(name) or "" for name in ("split", "group_idx", "traj_idx"))


TINKER: Final = Format(
    name="tinker",
    title="tinker-cookbook's capture",
    holds=Holds.SAMPLER,
    fits=lambda look: look.lines_with("kind", "scope", "prompt_tokens") and look.objects_with("samples", "tokens"),
    responses=_tinker_responses,
    step_of=lambda path: None,
)
