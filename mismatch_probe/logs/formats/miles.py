"""miles: `dashboard_columns/rollout_N.parquet` of `--dump-details`, a sample a row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mismatch_probe.logs.findings import Tell
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import Look, step_in_name
from mismatch_probe.logs.tables import read_table
from mismatch_probe.records.sequences import LoggedResponse

_COLUMNS: Final = ("tokens", "response_length", "loss_mask", "rollout_log_probs")


def _fits(look: Look) -> bool:
    return look.table_with("sample_index", "total_length", *_COLUMNS)


def _is_train(look: Look) -> bool:
    return look.saved_with("rollout_id", "rank", "rollout_data")


def _responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    step = step_in_name(path)
    for row in read_table(path, _COLUMNS):
        token_ids = row.ids("tokens")
        length = row.whole("response_length")
        if length is None or length > token_ids.size:
            raise row.refusal(f"response_length is {length} where tokens has {token_ids.size} entries")
        start = token_ids.size - length
        yield LoggedResponse(
            where=row.where,
            prompt_token_ids=token_ids[:start],
            token_ids=token_ids[start:],
            sampled=row.flags_or_all("loss_mask", length),
            log_mu=row.optional_numbers("rollout_log_probs", length),
            step=step,
        )


MILES: Final = Format(
    name="miles",
    title="miles' dashboard columns",
    holds=Holds.SAMPLER,
    fits=_fits,
    responses=_responses,
)
MILES_TRAIN: Final = Format(
    name="miles_train",
    title="miles' train dump",
    holds=Holds.NOTHING,
    fits=_is_train,
    why_not=(
        "each rank has slices of the sequences, some of them twice; give the folder dashboard_columns beside it, which "
        "has the sampler's side, and have the trainer's computed"
    ),
)
