"""What each server among the sides was found to do, in words."""

from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_probe.notation import write_number
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.view import Cell, Table

_NOT_TOLD = "could not be told"


def server_tables(manifest: Manifest) -> list[Table]:
    """One for each side that a server computes and that was sampled; none where every engine ran here."""
    tables = []
    for side in manifest.settings.infer_sides:
        applied = manifest.stages.get(side.stage("sample"), StageRecord()).effective_settings
        asked = applied.get("asked")
        if side.engine is not None and side.engine.is_remote and isinstance(asked, dict):
            rows: list[list[Cell]] = [[question, visible(answer)] for question, answer in _answers(applied, asked)]
            reading = "Asked of it before the first response, with a few tiny requests."
            tables.append(
                Table(
                    f"{side.name}: what the server was found to do", ["asked", "answer"], rows, frozenset({1}), reading
                )
            )
    return tables


def _answers(applied: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "software", f"{applied.get('software') or 'unknown'}, asked at {applied.get('url')}{applied.get('protocol')}"
    yield "servers at this address", str(asked.get("processes") or _NOT_TOLD)
    yield "model", f"{applied.get('model')}, from {applied.get('model_root') or 'it does not say where'}"
    yield "longest sequence", f"{applied.get('max_model_len') or _NOT_TOLD} tokens"
    yield "dtype", f"{applied.get('dtype')}, known from {applied.get('dtype_known_from')}"
    label = applied.get("weight_version")
    yield (
        "label of its weights",
        str(label) if applied.get("weights_are_labelled") else f"none ({label or 'it gives none'})",
    )
    yield "prompt ids come back", _yes_or_no(asked.get("echoes_prompt_ids"))
    yield "log-probs are those", str(asked.get("log_probs") or _NOT_TOLD)
    yield "the same request again", _moved(asked.get("again"))
    yield "the same among others", _moved(asked.get("in_a_crowd"))
    yield "the same with its prompt cached", _moved(asked.get("behind_the_cache"))
    yield "one seed gives the same tokens", _yes_or_no(asked.get("same_tokens"))
    yield "refuses ids that the checkpoint lacks", _yes_or_no(asked.get("refuses_unknown_ids"))
    p_value = asked.get("sampled_as_said")
    yield "tokens are drawn as its log-probs say", _NOT_TOLD if p_value is None else f"p = {write_number(p_value)}"
    yield "prompt log-probs", "asked for, one response at a time" if applied.get("prefill") else "not asked for"


def _yes_or_no(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, _NOT_TOLD) if isinstance(value, bool) else _NOT_TOLD


def _moved(nats: object) -> str:
    if not isinstance(nats, int | float):
        return _NOT_TOLD
    return "the same bits" if nats == 0 else f"log-probs move by up to {write_number(nats)} nats"
