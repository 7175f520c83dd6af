"""What `watch` prints of each step and at the end, and the document that it makes of them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from mismatch_probe import __version__
from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.plausible import left_out_sentence
from mismatch_probe.importing.following import Follower, MetricFollower
from mismatch_probe.importing.metrics import MetricWatch
from mismatch_probe.importing.watch_outcome import Tally, absent_steps, short_steps, steps_in_words
from mismatch_probe.importing.watching import JudgedStep, StepWatch
from mismatch_probe.notation import write_count, write_many, write_number
from mismatch_probe.records.lines import CurveReading, WatchedStep, WatchRecord
from mismatch_probe.report.answers.watch import watch_answer
from mismatch_probe.report.screen import print_answer, print_line
from mismatch_probe.report.training.course import actions_words
from mismatch_probe.verdict.curve_laws import is_grave

_SHOWN: Final = {
    "mismatch/abs_logprob_diff": "mean |d|",
    "mismatch/kl_k3": "KL (k3)",
    "mismatch/ess_token": "ESS",
}
_SHOWN_ALONE: Final = {
    "mismatch/abs_logprob_diff_seq": "mean |d| of responses",
    "mismatch/prob_abs_diff": "mean |pi - mu|",
    "mismatch/token_mult_prob_error": "probability factor",
    "policy/entropy": "entropy",
    "optim/grad_norm": "gradient norm",
    "reward/mean": "reward",
}
"""What metrics alone show of a step besides, the first ones of it."""
_MOST_SHOWN: Final = 4


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
_ABSENT_ALONE: Final = _ABSENT | {
    "mismatch/": "numbers of the mismatch, token by token",
    "policy/": "entropies",
    "response/": "numbers of responses",
}
"""The same of metrics alone."""


@dataclass
class WatchCourse:
    """What was seen so far. diagnosis: the likely cause, where a guard asked to stop. responses: of each step."""

    watch: StepWatch
    source: Path
    tally: Tally
    follower: Follower | MetricFollower | None = None
    steps: list[WatchedStep] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    absent: list[int] = field(default_factory=list)
    responses: dict[int, int] = field(default_factory=dict)
    reading: CurveReading | None = None
    """Of metrics alone: what the steps show together, at the end."""
    has_ended: bool = False
    _num_seen_for_growth: int = 0

    def follow(self, judged_steps: Iterator[JudgedStep], console: Console) -> None:
        """Print each step, to the one at which a guard asks to stop or patience is over."""
        for judged_step in judged_steps:
            is_first = judged_step.metrics and not any(known_step.metrics for known_step in self.steps)
            self.steps.append(_step_record(judged_step))
            self.tally.add(judged_step)
            if is_first:
                _say_how_many_are_on(self.watch, console)
            _say(judged_step, console)
            self.responses[judged_step.number] = judged_step.num_rows
            if judged_step.number in short_steps(dict(list(self.responses.items())[-_COMPARED:])):
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
        warning = self.watch.warning()
        if warning is not None:
            print_line(console, f"  {warning}", _MILD)

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
        if isinstance(self.watch, MetricWatch):
            self.reading = self.watch.reading()
            grave = [] if self.reading is None else list(filter(is_grave, self.reading.contradictions))
            self.tally.contradiction = grave[0].sentence if grave else None
        print_answer(watch_answer(self.record()), console)

    def record(self) -> WatchRecord:
        follower, tally, reading = self.follower, self.tally, self.reading
        return WatchRecord(
            tool_version=__version__,
            source=str(self.source),
            format=None if follower is None else follower.format_name,
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
            curve=None if reading is None else reading.curves[0],
            contradictions=[] if reading is None else reading.contradictions,
            causes=[] if reading is None else reading.causes,
            next_columns=[] if reading is None else reading.next_columns,
            bounds=self.watch.bounds if isinstance(self.watch, MetricWatch) else {},
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


def _say_how_many_are_on(watch: StepWatch, console: Console) -> None:
    """Most guards are off, because a log has few metrics of a training loop: count them by the absent metrics."""
    is_alone = isinstance(watch, MetricWatch)
    if isinstance(watch, MetricWatch):
        for sentence in watch.bounds.values():
            print_line(console, f"note: {sentence}", "dim")
    words = _ABSENT_ALONE if is_alone else _ABSENT
    off = Counter(_absent(lacking[0], words) for lacking in watch.guards_off.values())
    if not off:
        return
    counts = ", ".join(f"{what} ({write_count(number)})" for what, number in off.most_common())
    judge = "can be judged from these metrics" if is_alone else "judge this log"
    on = f"{write_count(watch.num_guards - off.total())} of {write_count(watch.num_guards)} guards {judge}."
    print_line(console, f"{on} The others are off, for want of: {counts}. --json lists them under guards_off", "dim")


def _absent(metric: str, words: Mapping[str, str]) -> str:
    return next(what for start, what in words.items() if metric.startswith(start))


def _say(judged_step: JudgedStep, console: Console) -> None:
    metric_texts = list(_metric_texts(judged_step, _SHOWN))
    if judged_step.num_rows:
        counts = f"{write_many(judged_step.num_responses, 'response')}, {write_many(judged_step.num_tokens, 'token')}"
        metric_texts = [counts, *metric_texts]
    else:
        metric_texts = [*metric_texts, *_metric_texts(judged_step, _SHOWN_ALONE)][:_MOST_SHOWN]
    print_line(console, f"step {judged_step.number}: {', '.join(metric_texts)}")
    for contradiction in judged_step.contradictions:
        style = _ALARM if contradiction.is_exact else _MILD
        print_line(console, f"  contradiction: {contradiction.sentence}. {contradiction.means}", style)
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


def _metric_texts(judged_step: JudgedStep, words_of: Mapping[str, str]) -> Iterator[str]:
    for name, words in words_of.items():
        if name in judged_step.metrics:
            least = "at least " if name in judged_step.bounds else ""
            yield f"{words} {least}{_write_value(judged_step.metrics[name])}"


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
