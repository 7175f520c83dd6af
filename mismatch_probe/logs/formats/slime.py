"""slime and miles: the dumps of `--dump-details`, one file of `torch.save` a rollout.

The train dump (version 2) has both sides. The rollout dump has the engine's alone, and the weight versions. A train
dump takes them from the rollout dump of the same name, in `rollout_data/` next to `train_data/`: `rollout_position`
counts its samples.

miles, which began as a copy of it: `dashboard_columns/rollout_N.parquet` of `--dump-details`, a sample a row.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileLook, step_in_name
from mismatch_probe.logs.recorded_choices import ragged_sets, routed_experts
from mismatch_probe.logs.row import LogFinding, Row, Tell
from mismatch_probe.logs.tables import read_table
from mismatch_probe.logs.torch_files import TorchFile, refusal, samples_of, saved_file, saved_row, saved_rows
from mismatch_probe.logs.weight_versions import Spans, version_of, weight_spans
from mismatch_probe.records.sequences import IntArray, KeptSets, LoggedResponse

Bools = npt.NDArray[np.bool_]

_ROLLOUT_FOLDER: Final = "rollout_data"
_OF_EVALUATION: Final = "eval_"
_CHOICES: Final = (
    "rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs",
)  # fmt: skip
_TRAIN: Final = (
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "log_probs", "ref_log_probs", "entropy",
    "rollout_position", *_CHOICES,
)  # fmt: skip
_ROLLOUT: Final = (
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "group_index", "status",
    *_CHOICES,
)  # fmt: skip
_OF_ORIGIN: Final = ("weight_versions", "group_index", "status", *_CHOICES)


def _is_train(look: FileLook) -> bool:
    return look.saved_with("format_version", "rollout_id", "samples")


def _is_rollout(look: FileLook) -> bool:
    return look.saved_with("rollout_id", "samples", "rollout_log_probs", "weight_versions") and not _is_train(look)


def _training_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    with _rollout_dump(path, tell) as sample_at, saved_file(path) as file:
        if file.content.get("format_version") != 2:
            raise refusal(path, "it is of another format_version than 2, which is read")
        step = Row(str(path), file.content).integer("rollout_id")
        for row in _samples(path, file, _TRAIN):
            response = _sampler_side(row, "response_lengths", Row.flags, "loss_masks")
            length = response.token_ids.size
            position = row.integer("rollout_position")
            origin = Row(row.where, {}) if position is None else sample_at(position) or Row(row.where, {})
            yield replace(
                _with_origin(response, origin, step),
                log_pi=row.optional_numbers("log_probs", length),
                log_ref=row.optional_numbers("ref_log_probs", length),
                entropy_nats=row.optional_numbers("entropy", length),
            )


def _rollout_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    if path.name.startswith(_OF_EVALUATION):
        tell(LogFinding.of(LogCode.EVALUATION_LEFT_OUT, evidence={"file": str(path)}, file=path))
        return
    with saved_file(path) as file:
        step = Row(str(path), file.content).integer("rollout_id")
        for row in _samples(path, file, _ROLLOUT):
            yield _with_origin(_sampler_side(row), row, step)


def _sampler_side(
    row: Row,
    length_column: str = "response_length",
    flags: Callable[[Row, str, int], Bools] = Row.flags_or_all,
    mask_column: str = "loss_mask",
) -> LoggedResponse:
    """Prompt, response and the engine's log-probs, which every dump has."""
    token_ids = row.ids("tokens")
    length = row.integer(length_column)
    if length is None or length > token_ids.size:
        raise row.refusal(f"{length_column} is {length} where tokens has {token_ids.size} entries")
    start = token_ids.size - length
    experts, kept = _choices(row)
    return LoggedResponse(
        where=row.where,
        prompt_token_ids=token_ids[:start],
        token_ids=token_ids[start:],
        sampled=flags(row, mask_column, length),
        log_mu=row.optional_numbers("rollout_log_probs", length),
        experts=experts,
        kept=kept,
    )


def _choices(row: Row) -> tuple[IntArray | None, KeptSets | None]:
    return (
        routed_experts(row, "rollout_routed_experts"),
        ragged_sets(row, "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs"),
    )


def _with_origin(response: LoggedResponse, origin: Row, step: int | None) -> LoggedResponse:
    """With the step, and with what the row of the rollout dump says of where the response is from."""
    experts, kept = _choices(origin)
    spans = _weight_spans(response, origin)
    return replace(
        response,
        experts=response.experts if experts is None else experts,
        kept=response.kept if kept is None else kept,
        step=step,
        weight_version=version_of(spans) if spans is not None else _weight_version(origin),
        weight_spans=spans,
        group=_group(origin, step),
        finish_reason=_finish(origin),
    )


def _samples(path: Path, file: TorchFile, columns: tuple[str, ...]) -> Iterator[Row]:
    return saved_rows(path, file, file.content.get("samples"), columns)


@contextmanager
def _rollout_dump(path: Path, tell: Tell) -> Iterator[Callable[[int], Row | None]]:
    """Give a function from a position to a sample of the rollout dump. Without a rollout dump it returns None,
    and `tell` gets a finding. Samples may share what they hold, so each is read when it is asked for.
    """
    dump = path.parent.parent / _ROLLOUT_FOLDER / path.name
    if not dump.is_file():
        tell(_no_versions(path, dump))
        yield lambda position: None
        return
    with saved_file(dump) as file:
        samples = samples_of(dump, file.content.get("samples"))

        def sample_at(position: int) -> Row | None:
            return saved_row(dump, file, samples, position, _OF_ORIGIN) if position < len(samples) else None

        yield sample_at


def _weight_spans(response: LoggedResponse, row: Row) -> Spans | None:
    """Those of miles' calls, which count from the prompt's first token; slime has a version a call, without places."""
    calls = row.columns.get("weight_versions")
    if not isinstance(calls, list) or not any(isinstance(call, Mapping) for call in calls):
        return None
    num_before = response.prompt_token_ids.size
    return weight_spans(row, "weight_versions", response.token_ids.size, num_before=num_before)


def _weight_version(row: Row) -> str | None:
    """The version that all calls of a sample name, or `FIRST-LAST` of several."""
    versions = row.columns.get("weight_versions") or []
    if not isinstance(versions, list) or not all(isinstance(version, str) for version in versions):
        raise row.refusal("weight_versions is no list of texts")
    if not versions:
        return None
    first, last = (row.short("weight_versions", versions[end]) for end in (0, -1))
    return first if len(set(versions)) == 1 else f"{first}-{last}"


def _group(row: Row, step: int | None) -> str | None:
    index = row.integer("group_index")
    return None if index is None else f"{step}/{index}"


def _finish(row: Row) -> str | None:
    return {"completed": "stop", "truncated": "length"}.get(row.text("status") or "")


def _no_versions(path: Path, rollouts: Path) -> LogFinding:
    return LogFinding.of(
        LogCode.NO_WEIGHT_VERSIONS, column="weight_version", evidence={"file": str(path)}, file=path, rollouts=rollouts
    )


SLIME: Final = Format(
    name="slime",
    title="slime's train dump (version 2)",
    holds=Holds.BOTH_SIDES,
    fits=_is_train,
    responses=_training_responses,
)
SLIME_ROLLOUT: Final = Format(
    name="slime_rollout",
    title="slime's rollout dump",
    holds=Holds.SAMPLER,
    fits=_is_rollout,
    responses=_rollout_responses,
)


_MILES: Final = ("tokens", "response_length", "loss_mask", "rollout_log_probs")


def _miles_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    step = step_in_name(path)
    for row in read_table(path, _MILES):
        yield replace(_sampler_side(row), step=step)


MILES: Final = Format(
    name="miles",
    title="miles' dashboard columns",
    holds=Holds.SAMPLER,
    fits=lambda look: look.table_with("sample_index", "total_length", *_MILES),
    responses=_miles_responses,
)
MILES_TRAIN: Final = Format(
    name="miles_train",
    title="miles' train dump",
    holds=Holds.NOTHING,
    fits=lambda look: look.saved_with("rollout_id", "rank", "rollout_data"),
    why_not=(
        "each rank has slices of the sequences, some of them twice; give the folder dashboard_columns beside it, which "
        "has the engine's side, and have the training path's computed"
    ),
)
