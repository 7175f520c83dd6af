"""`watch`: how the mismatch went over the steps, the likely cause, and the answer last, where the eye stops."""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.causes.training import EndCause
from mismatch_probe.inert import command_line
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.lines import MetricCurve, WatchRecord
from mismatch_probe.report.view import Answer, Badge, Terms
from mismatch_probe.stats.growth import StepLevels
from mismatch_probe.verdict.curves import curve_sentence, rises
from mismatch_probe.verdict.growth import course_words, growth_sentence, step_to_explain
from mismatch_probe.verdict.headline import against_limit

_KINDS: Final = {"pass": "clean", "fail": "bug", "inconclusive": "undecided", "broken": "broken"}
_COURSES: Final = {"mismatch/kl_k3": "KL (k3)", "mismatch/abs_logprob_diff": "mean |d|"}
_MILD: Final = ("warn", "log")
_INTERRUPTED: Final = "ended before its end"


def watch_answer(record: WatchRecord) -> Answer:
    """The course of the mismatch, what guards saw as its cause, the outcome with its reason, and what to do next."""
    terms = [
        (f"{words}, at least" if metric in record.bounds else words, course)
        for metric, words in _COURSES.items()
        for course in _course_of_metric(record, metric)
    ]
    terms += [*_growth_lines(record), *_of_metrics_alone(record), *_judged_by(record)]
    if record.diagnosis is not None:
        name = "what is known" if record.cause == EndCause.UNEXPLAINED else "likely cause"
        terms.append((name, record.diagnosis))
    return Answer(
        subject="watch",
        model=record.source,
        headline=f"{_outcome(record)}; {record.counts}",
        badge=_badge_of_outcome(record),
        advice=list(_advice_lines(record)),
        screen=[Terms(terms)] if terms else [],
        is_last=True,
    )


def _outcome(record: WatchRecord) -> str:
    if record.answer is None:
        return _INTERRUPTED
    if record.answer != "pass":
        return f"{record.answer}: {record.reason}"
    if record.growth is not None:
        size = against_limit(record.growth.last)
        return f"pass with a warning: {growth_sentence(record.growth, size)}; {record.reason}"
    if record.curve is not None:
        warning = " with a warning" if rises(record.curve) else ""
        return f"pass{warning}: {curve_sentence(record.curve)}; {record.reason}"
    course = _words_of_course(record)
    return f"pass: {record.reason}{course and f', and {course}'}"


def _badge_of_outcome(record: WatchRecord) -> Badge:
    if record.answer is None:
        return Badge("undecided", _INTERRUPTED)
    if record.answer == "pass" and record.growth is not None:
        return Badge("growing", "KL grows")
    if record.answer == "pass" and record.curve is not None and rises(record.curve):
        return Badge("growing", "mismatch grows")
    return Badge(_KINDS[record.answer], record.answer)


def _levels(record: WatchRecord) -> StepLevels | None:
    """None of fewer than two steps with a KL that is a number."""
    metric = "mismatch/kl_k3"
    rows = [(each.step, each.metrics.get(metric), each.num_tokens - each.left_out_tokens) for each in record.steps]
    points = [(step, kl, tokens) for step, kl, tokens in rows if isinstance(kl, float) and tokens > 0]
    return StepLevels(*zip(*points, strict=True)) if len(points) > 1 else None


def _words_of_course(record: WatchRecord) -> str:
    """Of a KL that shows no growth; empty where there are no two steps, or too few responses to show one."""
    levels = _levels(record)
    if levels is None or not record.can_show_growth:
        return ""
    return f"KL (k3) was {course_words(levels)}, {against_limit(levels.mean)}"


def _growth_lines(record: WatchRecord) -> Iterator[tuple[str, str]]:
    """How the KL went over the steps where the headline has another reason, or that no growth could be shown."""
    if record.growth is not None:
        if record.answer != "pass":
            yield "over the steps", growth_sentence(record.growth)
    elif _levels(record) is not None and not record.can_show_growth:
        yield "over the steps", "growth of the KL was not judged: these are too few responses to show one"
    elif record.answer != "pass" and (words := _words_of_course(record)):
        yield "over the steps", words


def _of_metrics_alone(record: WatchRecord) -> Iterator[tuple[str, str]]:
    if record.curve is None:
        return
    if record.answer != "pass":
        yield "over the steps", curve_sentence(record.curve)
    for contradiction in record.contradictions:
        yield "contradiction", f"{contradiction.sentence}. {contradiction.means}"
    if record.causes and (record.answer != "pass" or rises(record.curve)):
        yield "causes that fit", record.causes[0]


def _judged_by(record: WatchRecord) -> Iterator[tuple[str, str]]:
    num_on = record.num_guards - len(record.guards_off)
    if not record.num_judged or not num_on:
        return
    growth = ", and a test for growth over the steps" if record.can_show_growth else ""
    if record.curve is not None:
        growth = ", and the shape of its curve"
    off = " (the others read what the log lacks)" if record.guards_off else ""
    yield "judged by", f"{write_count(num_on)} of {write_count(record.num_guards)} guards{off}{growth}"


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
    if record.curve is not None:
        yield from _advice_on_metrics(record, record.curve)
    elif record.answer == "broken":
        command = command_line("import", record.source, "--out", "runs/log")
        yield f"Fix what is named at these steps where the log is written; `import` checks all of it: `{command}`"
    elif record.answer == "fail" or record.growth is not None:
        step = _step_to_explain(record)
        words = ("import", record.source, "--model", "CHECKPOINT", "--step", step, "--out", "runs/log")
        yield (
            f"With the checkpoint that sampled step {step}, each suspected cause is computed and compared with the "
            f"log: `{command_line(*words)}`"
        )


def _advice_on_metrics(record: WatchRecord, curve: MetricCurve) -> Iterator[str]:
    if record.answer == "pass" and not rises(curve):
        return
    command = command_line("import", record.source, "--out", "runs/curve")
    yield f"The curves, what contradicts what and all causes that fit: `{command}`"
    for column in record.next_columns[:1]:
        yield f"Log {column.name}: {column.shows}{f' ({column.how})' if column.how else ''}"


def _step_to_explain(record: WatchRecord) -> int:
    """The step that shows most of a growth, or the first at which a guard asked for more than a warning."""
    if record.growth is not None:
        return step_to_explain(record.growth)
    alarms = (
        step.step
        for step in record.steps
        if any(action not in _MILD for event in step.events for action in event["actions"])
    )
    return next(alarms, record.steps[-1].step)
