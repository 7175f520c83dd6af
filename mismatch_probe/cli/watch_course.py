"""What `watch` prints of each step and at the end, and the document that it makes of them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from mismatch_probe import __version__
from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.plausible import left_out_sentence
from mismatch_probe.importing.following import Follower, LoggedStep
from mismatch_probe.importing.watch_outcome import Tally, absent_steps, short_steps, steps_in_words
from mismatch_probe.importing.watching import JudgedStep, Watch
from mismatch_probe.notation import write_count, write_many, write_number
from mismatch_probe.records.lines import WatchedStep, WatchRecord
from mismatch_probe.report.answers.watch import watch_answer
from mismatch_probe.report.screen import print_answer, print_line
from mismatch_probe.report.training.course import actions_words
from mismatch_probe.verdict.curves import growth_sentence

_SHOWN: Final = {"mismatch/abs_logprob_diff": "mean |d|", "mismatch/kl_k3": "KL (k3)", "mismatch/ess_token": "ESS"}


_MILD, _ALARM = "yellow", "bold red"
"""The colours of what asks for a look, and of what asks for more."""
_COMPARED: Final = 64
_FEWEST_FOR_GROWTH: Final = 4
_SHORT: Final = "fewer responses than the other steps have, as where a file was cut off at the end of a line"
_ABSENT: Final = {
    "a canary": "a canary",
    "sync/": "weights sent to the engine",
    "mismatch/": "entropies",
    "policy/": "entropies",
    "correction/": "corrections",
    "response/": "how responses ended",
    "reward/": "rewards",
    "optim/": "the optimiser's numbers",
    "update/": "the update's size",
    "time/": "times",
    "": "metrics of your own",
}
"""What a log lacks that has not a metric, by how the metric's name begins."""


@dataclass
class WatchCourse:
    """What was seen so far. diagnosis: the likely cause, where a guard asked to stop. responses: of each step."""

    watch: Watch
    source: Path
    tally: Tally
    follower: Follower | None = None
    steps: list[WatchedStep] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    absent: list[int] = field(default_factory=list)
    responses: dict[int, int] = field(default_factory=dict)
    has_ended: bool = False
    _num_seen_for_growth: int = 0

    def follow(self, new_steps: Iterator[LoggedStep], console: Console) -> None:
        """Judge and print each step, to the one at which a guard asks to stop or patience is over."""
        for step in new_steps:
            judged_step = self.watch.judge(step)
            is_first = judged_step.metrics and not any(known_step.metrics for known_step in self.steps)
            self.steps.append(_step_record(judged_step))
            self.tally.add(judged_step)
            if is_first:
                _say_how_many_are_on(self.watch, console)
            _say(judged_step, console)
            self.responses[step.number] = len(step.responses)
            if step.number in short_steps(dict(list(self.responses.items())[-_COMPARED:])):
                print_line(console, f"  note: {_SHORT}", "dim")
            self._say_growth(console)
            if judged_step.actions:
                self.diagnosis = self.watch.diagnosis()
            if judged_step.asks_to_stop:
                print_line(console, f"A guard asks to stop at step {judged_step.number}.", "bold red")
            if judged_step.asks_to_stop or self.tally.is_out_of_patience:
                break

    def _say_growth(self, console: Console) -> None:
        """Whenever the steps have doubled, so that it is asked for seldom however long the log is."""
        number = len(self.tally.judged_steps)
        if number < _FEWEST_FOR_GROWTH or number & (number - 1) or number == self._num_seen_for_growth:
            return
        self._num_seen_for_growth = number
        growth = self.watch.growth()
        if growth is not None:
            print_line(console, f"  {growth_sentence(growth)}", _MILD)

    def end(self, console: Console) -> None:
        """Name what was not read; then the answer: how the mismatch went, the outcome, why, and the steps judged."""
        follower = self.follower
        if follower is not None:
            for number, why in follower.unfinished.items():
                print_line(console, f"step {number} is not complete and was not judged: {why}")
            for sentence in follower.left_out:
                print_line(console, sentence)
            newest = follower.newest
            self.tally.skipped = {
                "not complete": [step for step in follower.unfinished if newest is not None and step < newest],
                "gone before they were read": follower.vanished,
            }
            present_steps = {*(known_step.step for known_step in self.steps), *follower.unfinished, *follower.vanished}
            self.absent = absent_steps(present_steps)
            self.tally.skipped["absent from the log"] = self.absent
        if short := short_steps(self.responses):
            print_line(console, f"{steps_in_words(short)}: {_SHORT}")
        self.tally.fewest = self.watch.fewest_steps
        print_answer(watch_answer(self.record()), console)

    def record(self) -> WatchRecord:
        follower, tally = self.follower, self.tally
        return WatchRecord(
            tool_version=__version__,
            source=str(self.source),
            format=None if follower is None else follower.log.name,
            guards_off={name: list(lacking) for name, lacking in self.watch.guards_off.items()},
            num_guards=self.watch.num_guards,
            steps=self.steps,
            num_judged=len(tally.judged_steps),
            judged_in_part=tally.in_part,
            not_judged=tally.not_judged,
            unfinished=[] if follower is None else list(follower.unfinished),
            vanished=[] if follower is None else follower.vanished,
            absent=self.absent,
            rewritten=[] if follower is None else list(follower.rewritten),
            short=short_steps(self.responses),
            stopped_at=tally.stopped_at,
            growth=self.watch.growth(),
            can_show_growth=self.watch.can_show_growth,
            cause=None if self.diagnosis is None else self.diagnosis.cause,
            diagnosis=None if self.diagnosis is None else _what_is_known(self.diagnosis),
            answer=tally.outcome if self.has_ended else None,
            exit_code=tally.code if self.has_ended else None,
            reason=tally.reason if self.has_ended else None,
            counts=tally.counts,
        )


def _what_is_known(diagnosis: Diagnosis) -> str:
    """The cause and what to do about it; where none fits the answer has the next command."""
    return diagnosis.sentence if diagnosis.cause is EndCause.UNEXPLAINED else str(diagnosis)


def _say_how_many_are_on(watch: Watch, console: Console) -> None:
    """Most guards are off, because a log has few metrics of a training loop: count them by the absent metrics."""
    off = Counter(_absent(lacking[0]) for lacking in watch.guards_off.values())
    if not off:
        return
    counts = ", ".join(f"{what} ({write_count(number)})" for what, number in off.most_common())
    on = f"{write_count(watch.num_guards - off.total())} of {write_count(watch.num_guards)} guards judge this log."
    print_line(console, f"{on} The others are off, for want of: {counts}. --json lists them under guards_off", "dim")


def _absent(metric: str) -> str:
    return next(what for start, what in _ABSENT.items() if metric.startswith(start))


def _say(judged_step: JudgedStep, console: Console) -> None:
    metric_texts = [
        f"{words} {_write_value(judged_step.metrics[name])}"
        for name, words in _SHOWN.items()
        if name in judged_step.metrics
    ]
    counts = f"{write_many(judged_step.num_responses, 'response')}, {write_many(judged_step.num_tokens, 'token')}"
    print_line(console, f"step {judged_step.number}: {', '.join([counts, *metric_texts])}")
    for finding in judged_step.findings:
        print_line(console, f"  {finding.level.value}: {finding.sentence}", _ALARM)
    for note in judged_step.notes:
        print_line(console, f"  note: {note}", "dim")
    if judged_step.why_not is not None:
        print_line(console, f"  not judged: {judged_step.why_not}", _MILD)
    elif sentence := left_out_sentence(judged_step.left_out):
        print_line(console, f"  {sentence}", "dim")
    if judged_step.missing:
        print_line(console, f"  guards that read {', '.join(judged_step.missing)} could not judge it", _MILD)
    for event in judged_step.events:
        actions = actions_words([str(action) for action in event.actions])
        only_warns = all(action.kind.strength <= ActionKind.WARN.strength for action in event.actions)
        style = _MILD if only_warns else _ALARM
        print_line(console, f"  {event.guard}: {event.sentence}; asks to {actions}", style)


def _write_value(value: float) -> str:
    return write_number(value) if math.isfinite(value) else str(value)


def _step_record(judged_step: JudgedStep) -> WatchedStep:
    return WatchedStep(
        step=judged_step.number,
        num_responses=judged_step.num_responses,
        num_tokens=judged_step.num_tokens,
        left_out_tokens=int(judged_step.left_out.out),
        metrics={
            name: value if math.isfinite(value) else str(value)  # type: ignore[misc]
            for name, value in judged_step.metrics.items()
        },
        findings=[finding.code for finding in judged_step.findings],
        events=[event.as_json() for event in judged_step.events],
    )
