"""What `watch` saw: every step that it judged, and how it ended."""

from typing import Any, Literal

from mismatch_probe.records.summary import Record

WATCH_VERSION = 1


class WatchedStep(Record):
    """A step of a log. metrics: by name, a number, or the name of what is none; empty where it was not judged.

    left_out_tokens: those without a log-prob on a side. findings: codes of what makes its numbers doubtful. events:
    firings, as `train` records them.
    """

    step: int
    num_responses: int
    num_tokens: int
    left_out_tokens: int = 0
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    findings: list[str] = []
    events: list[dict[str, Any]] = []


class WatchRecord(Record):
    """format: None where the folder held no log. guards_off: the guards that the log cannot serve, and what each lacks.
    num_judged: steps that every other guard judged; judged_in_part: those that some judged; not_judged: those that none
    did. unfinished: steps that were there at the end and not whole, and were not judged. vanished: steps whose files
    went away before they were read. absent: numbers of steps that the log leaves out between those that it has.
    rewritten: steps that were written to again after they were judged. stopped_at: the step at which a guard asked to
    stop, and `diagnosis` its likely cause; None where none did. reason: why the exit code is what it is; None where the
    watch was interrupted or the log could not be followed to its end.
    """

    schema_version: int = WATCH_VERSION
    tool_version: str
    source: str
    format: str | None
    guards_off: dict[str, list[str]]
    steps: list[WatchedStep]
    num_judged: int = 0
    judged_in_part: list[int] = []
    not_judged: list[int] = []
    unfinished: list[int] = []
    vanished: list[int] = []
    absent: list[int] = []
    rewritten: list[int] = []
    stopped_at: int | None
    diagnosis: str | None
    reason: str | None = None
