"""The outcome of a watch: how many steps were judged, what guards asked for, and the exit code."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median_low
from typing import Final, Literal

from mismatch_probe.errors import ExitCode
from mismatch_probe.guards.actions import Action
from mismatch_probe.importing.watching import JudgedStep
from mismatch_probe.notation import write_count, write_many, write_percent
from mismatch_probe.report.training.course import action_words

_MOST_STRETCHES: Final = 8
_MOST_ABSENT: Final = 10_000
"""The most absent steps that are counted in one gap: a step may have any number."""
_FEWEST_COMPARED: Final = 4
_ALIKE: Final = 0.9
WatchOutcome = Literal["pass", "fail", "inconclusive", "broken"]
_OUTCOMES: Final[dict[ExitCode, WatchOutcome]] = {
    ExitCode.PASS: "pass",
    ExitCode.GATE_FAILED: "fail",
    ExitCode.INCONCLUSIVE: "inconclusive",
    ExitCode.ENVIRONMENT: "broken",
}


@dataclass(frozen=True)
class Patience:
    """How many steps may pass that could not be judged."""

    in_a_row: int = 3
    """So many steps in a row end the watch; with 0 no number does."""
    share: float = 0.1
    """The largest share of all steps, at the end."""


@dataclass
class Tally:
    """Counts of the steps so far."""

    patience: Patience
    judged_steps: list[int] = field(default_factory=list)
    """The steps that every active guard judged."""
    in_part: list[int] = field(default_factory=list)
    """The steps that only some of these guards judged."""
    not_judged: list[int] = field(default_factory=list)
    broken_steps: list[int] = field(default_factory=list)
    """The steps whose numbers are meaningless."""
    contradiction: str | None = None
    """Of metrics alone: why they are not what their names say."""
    stopped_at: int | None = None
    """The step at which a guard asked to stop."""
    skipped: dict[str, list[int]] = field(default_factory=dict)
    """The steps of the log that could not be read, by reason."""
    fewest: int = 1
    """So many steps must be judged before the guards can ask for anything."""
    _request_step: int = 0
    _strongest: Action | None = None
    _requesting_guards: tuple[str, ...] = ()
    _unjudged_in_a_row: int = 0
    _guards_that_warned: set[str] = field(default_factory=set)

    def add(self, step: JudgedStep) -> None:
        if step.is_judged:
            self.judged_steps.append(step.number)
            self._unjudged_in_a_row = 0
        else:
            (self.in_part if step.metrics else self.not_judged).append(step.number)
            self._unjudged_in_a_row += 1
        if step.is_broken:
            self.broken_steps.append(step.number)
        self._guards_that_warned |= {event.guard for event in step.events}
        if step.asks_to_stop:
            self.stopped_at = step.number
        if step.actions and (self._strongest is None or step.actions[0].kind.strength > self._strongest.kind.strength):
            self._strongest, self._request_step = step.actions[0], step.number
            self._requesting_guards = tuple(event.guard for event in step.events if step.actions[0] in event.actions)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether too many steps in a row could not be judged."""
        return 0 < self.patience.in_a_row <= self._unjudged_in_a_row

    @property
    def code(self) -> ExitCode:
        """1 where a guard asked to stop; else 4 where numbers are meaningless, 1 where guards asked for more than a
        warning, and 3 where too few steps were judged.
        """
        if self.stopped_at is not None:
            return ExitCode.GATE_FAILED
        if self.broken_steps or self.contradiction is not None:
            return ExitCode.ENVIRONMENT
        if self._strongest is not None:
            return ExitCode.GATE_FAILED
        return ExitCode.PASS if self._why_inconclusive() is None else ExitCode.INCONCLUSIVE

    @property
    def counts(self) -> str:
        """The number of steps that were judged, and which steps were not."""
        parts = {
            "not judged": self.not_judged,
            "judged by some guards only": self.in_part,
            **self.skipped,
        }
        others = "".join(f"; {what}: {steps_in_words(numbers)}" for what, numbers in parts.items() if numbers)
        return f"judged {write_count(len(self.judged_steps))} of {write_many(self._num_steps, 'step')}{others}"

    @property
    def outcome(self) -> WatchOutcome:
        """The exit code as a word."""
        return _OUTCOMES[self.code]

    @property
    def reason(self) -> str:
        """The reason for the exit code."""
        if self.stopped_at is not None:
            return f"a guard asked to stop at step {self.stopped_at}"
        if self.broken_steps:
            return f"the numbers of {steps_in_words(self.broken_steps)} must not be trusted"
        if self.contradiction is not None:
            return f"numbers of this log contradict each other: {self.contradiction}"
        if self._strongest is not None:
            action, guards = action_words(str(self._strongest)), ", ".join(self._requesting_guards)
            return f"guards asked for more than a warning: {action} at step {self._request_step} ({guards})"
        why = self._why_inconclusive()
        if why is not None:
            return why
        if self._guards_that_warned:
            return f"no guard asked for more than a warning ({', '.join(sorted(self._guards_that_warned))} fired)"
        return "no guard fired"

    @property
    def _num_steps(self) -> int:
        return len(self.judged_steps) + self._num_not_judged

    @property
    def _num_not_judged(self) -> int:
        return len(self.in_part) + len(self.not_judged) + sum(map(len, self.skipped.values()))

    def _why_inconclusive(self) -> str | None:
        if self.is_out_of_patience:
            in_a_row = f"{self._unjudged_in_a_row} steps in a row could not be judged"
            return f"{in_a_row}, so that later ones were not read (--unjudged {self.patience.in_a_row})"
        if not self.judged_steps and not self.in_part:
            return "no step could be judged"
        if self._num_not_judged > self.patience.share * self._num_steps:
            return (
                f"{write_count(self._num_not_judged)} of {write_count(self._num_steps)} steps could not be judged, "
                f"more than {write_percent(self.patience.share)} (--unjudged-share {self.patience.share:g})"
            )
        if len(self.judged_steps) + len(self.in_part) < self.fewest:
            return f"too few to pass: guards that are on wait for {self.fewest} broken steps in a row"
        return None


def absent_steps(numbers: Collection[int]) -> list[int]:
    """The numbers that a log leaves out between its steps, by the stride at which most of its steps follow."""
    present = sorted(numbers)
    strides = Counter(next_number - before for before, next_number in pairwise(present))
    if not strides:
        return []
    stride = min(strides, key=lambda gap: (-strides[gap], gap))
    return [
        number
        for before, next_number in pairwise(present)
        for number in islice(range(before + stride, next_number, stride), _MOST_ABSENT)
    ]


def short_steps(counts: Mapping[int, int]) -> list[int]:
    """The steps with far fewer responses than the others, as where a file was cut off at the end of a line.

    `counts` has the responses of each step. A step is short with fewer responses than half of the median, or, where
    nine tenths of the steps have the same number, with fewer than that. Among fewer than four steps none is short.
    """
    if len(counts) < _FEWEST_COMPARED:
        return []
    usual = median_low(counts.values())
    alike = sum(count == usual for count in counts.values()) >= _ALIKE * (len(counts) - 1)
    least = usual if alike else usual / 2
    return sorted(step for step, count in counts.items() if count < least)


def steps_in_words(numbers: Collection[int]) -> str:
    """`step 3`, `steps 1, 4 to 9`; only the first ranges where there are very many."""
    stretches = list(_runs_of_numbers(sorted(numbers)))
    ranges = [str(first) if first == last else f"{first} to {last}" for first, last in stretches[:_MOST_STRETCHES]]
    more = " and more" if len(stretches) > _MOST_STRETCHES else ""
    return f"step{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}{more}"


def _runs_of_numbers(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """The first and the last of each run of numbers that follow each other."""
    firsts = [numbers[0], *(next_number for number, next_number in pairwise(numbers) if next_number != number + 1)]
    lasts = [*(number for number, next_number in pairwise(numbers) if next_number != number + 1), numbers[-1]]
    return zip(firsts, lasts, strict=True)
