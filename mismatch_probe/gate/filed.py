"""Limits on what `headroom` and `localize` found and filed with a run: exact, and refused where it is not there."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from mismatch_probe.command_line import command_line
from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.gate.config import FiledCheck
from mismatch_probe.gate.filed_metrics import FILED_METRICS, HEADROOM
from mismatch_probe.notation import write_number
from mismatch_probe.records.findings import Findings, localize_file
from mismatch_probe.records.gate_result import CheckResult
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.kinds import HEADROOM_FILE
from mismatch_probe.records.localize import Localization
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.verdict.next_commands import RUN, localize_command


def filed_results(checks: Sequence[FiledCheck], run: Path, manifest: Manifest) -> list[CheckResult]:
    """Every check on what is filed with a run.

    Raises:
        BrokenRecord: a document is not there, cannot be read, is of another checkpoint, or lacks what is asked for.
    """
    return [result for check in checks for result in _results(check, run, manifest)]


def _results(check: FiledCheck, run: Path, manifest: Manifest) -> Iterator[CheckResult]:
    if check.metric in HEADROOM:
        path = run / HEADROOM_FILE
        again = command_line("headroom", "--run", run)
        yield _result(check, Findings(run).headroom(), Dtype.FP16, path, manifest, again)
        return
    localizations = Findings(run).localizations()
    for pair in manifest.settings.pairs if check.slice.pair is None else (check.slice.pair,):
        localization = next((document for document in localizations if document.settings.names == pair), None)
        again = localize_command(*pair).replace(RUN, shlex.quote(str(run)))
        yield _result(check, localization, "/".join(pair), run / localize_file(*pair), manifest, again)


def _result(
    check: FiledCheck, document: Headroom | Localization | None, pair: str, path: Path, manifest: Manifest, again: str
) -> CheckResult:
    """`pair` is what the check is shown with, `again` the command that makes the document."""
    made = f"make it with `{again}`"
    if document is None:
        raise BrokenRecord(f"the check {check} needs {path}, which is not there: {made}")
    if document.model_fingerprint != manifest.model.fingerprint:
        raise BrokenRecord(f"{path} is of another checkpoint than the run: remove it and {made}")
    value = FILED_METRICS[check.metric].read(document)
    if isinstance(value, str):
        raise BrokenRecord(f"the check {check} cannot be answered by {path}, because {value}: remove it and {made}")
    kept = check.is_kept_by(value)
    what = f"{check.metric.replace('_', ' ')} of {_label(pair)} is {write_number(value)}"
    num_sequences, num_tokens = _size(document)
    return CheckResult(
        metric=check.metric,
        measured=check.metric,
        pair=pair,
        kind=check.kind,
        limit=check.limit,
        level="error" if check.level == "error" else "warn",
        answer="pass" if kept else "fail",
        sentence=f"{what}; {check.asked} is {'kept' if kept else 'broken'}",
        value=value,
        low=None,
        high=None,
        bound_level=0.0,
        p_value=None,
        holm_level=None,
        passing_limit=None if check.kind == "equal" else value,
        run_value=value,
        baseline_value=None,
        comparison=None,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        by="token",
        source=check.source,
    )


def _label(pair: str) -> str:
    """What the check is of as the report calls it: two sides, or one dtype."""
    sides = pair.split("/")
    return sides_label(sides[0], sides[-1])


def _size(document: Headroom | Localization) -> tuple[int, int]:
    """Sequences and tokens that were looked at."""
    if isinstance(document, Localization):
        return document.looked_into_sequences, document.looked_into_tokens
    over = document.activations
    return (0, 0) if over is None else (over.num_sequences, over.num_tokens)
