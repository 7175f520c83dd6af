"""`watch`: how the mismatch went over the steps, the likely cause, and the answer last, where the eye stops."""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.inert import command_line
from mismatch_probe.notation import write_number
from mismatch_probe.records.lines import WatchRecord
from mismatch_probe.report.view import Answer, Badge, Terms

_KINDS: Final = {"pass": "clean", "fail": "bug", "inconclusive": "undecided", "broken": "broken"}
_COURSES: Final = {"mismatch/kl_k3": "KL (k3)", "mismatch/abs_logprob_diff": "mean |d|"}
_INTERRUPTED: Final = "ended before its end"


def watch_answer(record: WatchRecord) -> Answer:
    """The course of the mismatch, what guards saw as its cause, the outcome with its reason, and what to do next."""
    kind = "undecided" if record.answer is None else _KINDS[record.answer]
    outcome = _INTERRUPTED if record.answer is None else f"{record.answer}: {record.reason}"
    terms = [(words, course) for metric, words in _COURSES.items() for course in _course_of_metric(record, metric)]
    if record.diagnosis is not None:
        terms.append(("likely cause", record.diagnosis))
    return Answer(
        subject="watch",
        model=record.source,
        headline=f"{outcome}; {record.counts}",
        badge=Badge(kind, record.answer or _INTERRUPTED),
        advice=list(_advice_lines(record)),
        screen=[Terms(terms)] if terms else [],
        is_last=True,
    )


def _course_of_metric(record: WatchRecord, metric: str) -> Iterator[str]:
    """The first and the last value of a metric and their steps, and the largest where it is neither; of one step,
    nothing.
    """
    values = [(float(step.metrics[metric]), step.step) for step in record.steps if metric in step.metrics]
    if len(values) < 2:
        return
    first, last = values[0], values[-1]
    ends = ", ".join(f"{write_number(value)} at step {step}" for value, step in (first, last))
    value, step = max(values)
    yield ends if (value, step) in (first, last) else f"{ends}; largest {write_number(value)} at step {step}"


def _advice_lines(record: WatchRecord) -> Iterator[str]:
    if record.answer in ("fail", "broken"):
        command = command_line("import", record.source, "--out", "runs/log")
        yield f"Make a run of the log, of which `explain` names the cause with the checkpoint: `{command}`"
