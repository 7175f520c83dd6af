"""What guards do and where they act, in words; what a run's files say of guards may be anybody's."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mismatch_probe.guards.metric_words import metric_words
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.report.figures.limits import Limit
from mismatch_probe.report.names import listed
from mismatch_probe.report.training.course import Course, Firing

_DONE: Final = {
    "log": "write it down",
    "warn": "warn",
    "tighten_sequences": "drop the sequences with the largest weights",
    "leave_out": "leave out responses without a reward",
    "skip_update": "skip the update",
    "lower_learning_rate": "lower the learning rate",
    "switch_correction": "switch the correction",
    "resync": "send the weights again",
    "raise_precision": "raise the precision",
    "rollback": "go back to the last good checkpoint",
    "stop": "stop",
}
_BY: Final = {
    "lower_learning_rate(level)": "lower the learning rate to its level before",
    "lower_learning_rate": "multiply the learning rate by {}",
    "tighten_sequences": "drop the sequences with the largest weights, the bound times {}",
}
"""What an action with an argument does, or with this argument."""


def action_words(action: str) -> str:
    """`skip the update`; an action that this version does not know as it was written."""
    name, argument = _parts(action)
    words = _DONE.get(name)
    if words is None or not argument:
        return words or action
    return _BY.get(action, _BY.get(name, f"{words} ({{}})")).format(argument)


def actions_words(actions: Sequence[str]) -> str:
    return ", ".join(map(action_words, actions))


def firing_words(firing: Firing) -> list[str]:
    """What it saw and what it asked for, line by line."""
    return [firing.sentence, f"asked to {actions_words(firing.actions)}"]


def off_words(off: Mapping[str, Sequence[str]]) -> str:
    """Guards that are off, each with the metrics that no step gave it."""
    lacked = {guard: listed([metric_words(name) for name in lacking]) for guard, lacking in off.items()}
    told = ", ".join(f"{guard} (lacks {what})" for guard, what in lacked.items())
    return f"Guards that are off in this run: {told}."


def times(number: int) -> str:
    return "once" if number == 1 else f"{write_count(number)} times"


def limits_on(metric: str, course: Course) -> Iterator[Limit]:
    """Where guards of the rule `limit` act on a metric."""
    for guard in course.manifest.guards:
        if guard.get("rule") != "limit" or guard.get("metric") != metric:
            continue
        name, asked = str(guard.get("name")), asked_words(guard.get("actions"))
        for side, is_upper in (("above", True), ("below", False)):
            value = guard.get(side)
            if isinstance(value, float | int) and math.isfinite(value):
                surely = f" by {guard.get('errors')} standard errors" if guard.get("error") else ""
                words = f"guard {name}: {side} {write_number(float(value))}{surely} it asks to {asked}"
                yield Limit(float(value), is_upper, words)


def asked_words(firings: Any) -> str:
    """`warn`, or `skip the update, then stop` where later firings ask for more."""
    if not isinstance(firings, list):
        return "act"
    steps = [actions_words([str(action) for action in firing]) for firing in firings if isinstance(firing, list)]
    return ", then ".join(dict.fromkeys(steps)) or "act"


def _parts(action: str) -> tuple[str, str]:
    match = re.fullmatch(r"(\w+)\(([^()]*)\)", action)
    return (match[1], match[2]) if match else (action, "")
