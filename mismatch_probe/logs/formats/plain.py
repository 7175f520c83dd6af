"""Our own format: JSON lines or parquet, a response a row (`docs/logs.md`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileKind, look_at
from mismatch_probe.logs.recorded_choices import kept_sets, routed_experts
from mismatch_probe.logs.row import LogFinding, Row, Tell, read_lines
from mismatch_probe.logs.tables import read_table
from mismatch_probe.logs.weight_versions import version_of, weight_spans
from mismatch_probe.records.sequences import LoggedResponse

NEEDED: Final = ("prompt_token_ids", "token_ids", "logprobs")
OPTIONAL: Final = (
    "train_logprobs", "ref_logprobs", "entropy", "mask", "step", "weight_version", "weight_versions", "temperature",
    "group", "trajectory", "finish_reason", "model", "routed_experts", "kept_token_ids",
)  # fmt: skip


def _plain_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    look = look_at(path)
    if unread := sorted(look.keys.difference(NEEDED, OPTIONAL)):
        evidence = {"file": str(path), "columns": unread}
        tell(LogFinding.of(LogCode.UNREAD_COLUMNS, evidence=evidence, file=path, columns=", ".join(unread)))
    rows = read_table(path, NEEDED + OPTIONAL) if look.kind == FileKind.PARQUET else read_lines(path, tell)
    for row in rows:
        yield _plain_response(row)


def _plain_response(row: Row) -> LoggedResponse:
    token_ids = row.ids("token_ids")
    length = token_ids.size
    spans = weight_spans(row, "weight_versions", length)
    return LoggedResponse(
        where=row.where,
        prompt_token_ids=row.ids("prompt_token_ids"),
        token_ids=token_ids,
        sampled=row.flags_or_all("mask", length),
        log_mu=row.optional_numbers("logprobs", length),
        log_pi=row.optional_numbers("train_logprobs", length),
        log_ref=row.optional_numbers("ref_logprobs", length),
        entropy_nats=row.optional_numbers("entropy", length),
        step=row.integer("step"),
        weight_version=row.text("weight_version") or version_of(spans),
        weight_spans=spans,
        temperature=row.number("temperature"),
        group=row.text("group"),
        trajectory=row.text("trajectory"),
        finish_reason=row.text("finish_reason"),
        model=row.text("model"),
        experts=routed_experts(row, "routed_experts"),
        kept=kept_sets(row, "kept_token_ids"),
    )


PLAIN: Final = Format(
    name="plain",
    title="the plain format of this tool",
    holds=Holds.BOTH_SIDES,
    fits=lambda look: look.lines_with(*NEEDED) or look.table_with(*NEEDED),
    responses=_plain_responses,
    step_of=lambda path: None,
)
