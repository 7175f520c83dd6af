"""NeMo-RL: `train_data_step{N}.jsonl`, one padded row a line; index i of a row is about token i.

A rollout that replays a cut vocabulary adds the set that each token was drawn from (`sampling_support_token_ids`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import step_in_name
from mismatch_probe.logs.recorded_choices import ABSENT, kept_sets
from mismatch_probe.logs.row import Row, Tell, read_lines, split_by_mask
from mismatch_probe.records.sequences import KeptSets, LoggedResponse

_COLUMNS: Final = ("token_ids", "token_loss_mask", "sample_loss_mask", "generation_logprobs", "prev_logprobs")
_SUPPORT: Final = "sampling_support_token_ids"


def _nemo_rl_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    step = step_in_name(path)
    for line in read_lines(path, tell):
        row = Row(line.where, {key: _unwrap(value) for key, value in line.columns.items()})
        token_ids = row.ids("token_ids")
        padded_length = token_ids.size
        length = row.integer("input_lengths")
        if length is None or length > padded_length:
            raise row.refusal(f"input_lengths is {length} where token_ids has {padded_length} entries")
        in_loss = row.flags("token_loss_mask", padded_length)
        if in_loss[length:].any():
            raise row.refusal(f"token_loss_mask counts tokens behind input_lengths, {length}: the padding is elsewhere")
        response = split_by_mask(
            where=row.where,
            token_ids=token_ids[:length],
            own=in_loss[:length],
            sampled=in_loss[:length] & bool(row.number("sample_loss_mask")),
            log_mu=row.numbers("generation_logprobs", padded_length)[:length],
            log_pi=row.numbers("prev_logprobs", padded_length)[:length],
            step=step,
            num_padding=padded_length - length,
        )
        yield replace(response, kept=_support(row, slice(response.prompt_token_ids.size, length), padded_length))


def _support(row: Row, tokens: slice, padded_length: int) -> KeptSets | None:
    """The sets of the response's tokens; of a row without them None. Numbers below 0 pad a set."""
    value = row.columns.get(_SUPPORT)
    if not isinstance(value, list):
        return kept_sets(row, _SUPPORT)
    if len(value) != padded_length:
        raise row.refusal(f"{_SUPPORT} has sets of {len(value)} tokens where token_ids has {padded_length} entries")
    sets = [
        [token_id for token_id in each if token_id != ABSENT] if isinstance(each, list) else each
        for each in value[tokens]
    ]
    return kept_sets(Row(row.where, {_SUPPORT: sets}), _SUPPORT)


def _unwrap(value: Any) -> Any:
    """What stands in the list of one that a micro-batch of one makes of every value."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


NEMO_RL: Final = Format(
    name="nemo_rl",
    title="NeMo-RL's train_data_stepN.jsonl",
    holds=Holds.BOTH_SIDES,
    fits=lambda look: look.lines_with("input_lengths", *_COLUMNS),
    responses=_nemo_rl_responses,
)
