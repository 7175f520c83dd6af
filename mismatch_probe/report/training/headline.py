"""The first sentence on training runs: how they ended, by which guard and why, or what reward and mismatch did."""

from collections.abc import Sequence

from markupsafe import Markup

from mismatch_probe.notation import write_count, write_many, write_number
from mismatch_probe.records.training_run import MetricCourse, TrainingSummary
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import listed
from mismatch_probe.report.training.guard_words import times
from mismatch_probe.report.training.summarise import MISMATCH, REWARD

_ENDINGS = {
    "finished": ("finished", "finished"),
    "stopped": ("was stopped by a guard", "were stopped by a guard"),
    "unfinished": ("is unfinished", "are unfinished"),
}


def run_headline(summary: TrainingSummary) -> Markup:
    """How a run ended, and what reward and mismatch did, or which guard stopped it and why."""
    if not summary.steps:
        return Markup("No step is recorded yet.")
    done, asked = write_count(summary.steps), write_count(summary.steps_asked)
    if summary.outcome == "stopped":
        told = visible(_stoppers(summary)), done, asked, visible(why(summary))
        return Markup("{} stopped the run at step {} of {}. {}").format(*told)
    finished = f"Finished {write_many(summary.steps, 'step')}"
    outcome = finished if summary.outcome == "finished" else f"Unfinished after step {done} of {asked}"
    guards = f"guards fired {times(summary.num_events)}" if summary.num_events else "no guard fired"
    return Markup("{}: {}; {}.").format(outcome, _course(summary), guards)


def runs_headline(runs: Sequence[tuple[str, TrainingSummary]]) -> str:
    """How several runs, each with its name, ended."""
    endings = [summary.outcome for _, summary in runs]
    if set(endings) == {"finished"}:
        ends = [f"{_last_reward(summary)} ({label})" for label, summary in runs if REWARD in summary.metrics]
        return f"All {len(runs)} runs finished." + (f" Reward at the end {listed(ends)}." if ends else "")
    counts = {ending: endings.count(ending) for ending in _ENDINGS if ending in endings}
    told = listed([f"{number} {_ENDINGS[ending][number > 1]}" for ending, number in counts.items()])
    stopped = "; ".join(
        f"{label} at step {write_count(summary.steps)} by {_names(summary)}"
        for label, summary in runs
        if summary.outcome == "stopped"
    )
    return f"Of {len(runs)} runs {told}" + (f": {stopped}." if stopped else ".")


def stopping_guards(summary: TrainingSummary) -> list[str]:
    """Names of those that asked to stop at the last step; empty where no record names one."""
    return [guard.guard for guard in summary.guards if "stop" in guard.actions and guard.last_step >= summary.steps]


def why(summary: TrainingSummary) -> str:
    """The cause of a stop without its details: what the diagnosis says before its first colon or full stop."""
    cause = (summary.diagnosis or "").split(". ")[0].split(": ")[0].rstrip(".")
    return f"{cause}." if cause else ""


def _stoppers(summary: TrainingSummary) -> str:
    names = stopping_guards(summary)
    return "A guard" if not names else f"Guard{'s' if len(names) > 1 else ''} {listed(names)}"


def _names(summary: TrainingSummary) -> str:
    return listed(stopping_guards(summary) or ["a guard"])


def _last_reward(summary: TrainingSummary) -> str:
    return write_number(summary.metrics[REWARD].last)


def _course(summary: TrainingSummary) -> Markup:
    words = [
        Markup("{} {}{}").format(name, _from_to(summary.metrics[metric]), unit)
        for name, metric, unit in (("reward", REWARD, ""), ("mismatch (k3)", MISMATCH, " nats a token"))
        if metric in summary.metrics
    ]
    return Markup(", ").join(words) if words else Markup("no step yet")


def _from_to(course: MetricCourse) -> Markup:
    """Two numbers that no line break may cut."""
    number = Markup('<span class="whole">{}</span>').format
    return Markup("from {} to {}").format(number(write_number(course.first)), number(write_number(course.last)))
