"""What `watch` does once its flags are parsed; imported only then, because it loads the heavy parts."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from mismatch_probe import __version__
from mismatch_probe.cli.output import narration, print_json, results
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.guards.defaults import DEFAULT_GUARDS
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.load import load_guards
from mismatch_probe.importing.following import Follower, LoggedStep
from mismatch_probe.importing.watching import JudgedStep, Watch
from mismatch_probe.logs import Format, recognise
from mismatch_probe.notation import write_count, write_many, write_number
from mismatch_probe.records.watch import WatchedStep, WatchRecord

_SHOWN: Final = {"mismatch/abs_logprob_diff": "mean |d|", "mismatch/kl_k3": "KL (k3)", "mismatch/ess_token": "ESS"}


_ABSENT: Final = {
    "a canary": "a canary",
    "sync/": "weights sent to the engine",
    "mismatch/": "entropies",
    "response/": "how responses ended",
    "reward/": "rewards",
    "optim/": "the optimiser's numbers",
    "update/": "the update's size",
    "time/": "times",
    "": "metrics of your own",
}
"""What a log lacks that has not a metric, by how the metric's name begins."""


@dataclass
class _Course:
    """What was seen so far. stopped_at: the step at which a guard asked to stop, with its likely cause."""

    watch: Watch
    follower: Follower
    source: Path
    steps: list[WatchedStep] = field(default_factory=list)
    is_broken: bool = False
    stopped_at: int | None = None
    diagnosis: Diagnosis | None = None

    def follow(self, new_steps: Iterator[LoggedStep], console: Console) -> None:
        """Judge and print each step, to the one at which a guard asks to stop."""
        for step in new_steps:
            judged = self.watch.judge(step)
            is_first = judged.metrics and not any(seen.metrics for seen in self.steps)
            self.steps.append(_recorded(judged))
            self.is_broken |= judged.is_broken
            if is_first:
                _say_how_many_are_on(self.watch, console)
            _say(judged, console)
            if judged.asks_to_stop:
                self.stopped_at, self.diagnosis = judged.number, self.watch.diagnosis()
                console.print(f"A guard asks to stop at step {self.stopped_at}. {self.diagnosis}", soft_wrap=True)
                break

    def record(self) -> WatchRecord:
        return WatchRecord(
            tool_version=__version__,
            source=str(self.source),
            format=self.follower.log.name,
            guards_off={name: list(lacking) for name, lacking in self.watch.off.items()},
            steps=self.steps,
            unfinished=self.follower.unfinished,
            rewritten=self.follower.rewritten,
            stopped_at=self.stopped_at,
            diagnosis=None if self.diagnosis is None else str(self.diagnosis),
        )


def run_watch(
    source: Path, guards: Path | None, format_name: str | None, *, idle: float | None, every: float, json_output: bool
) -> ExitCode:
    """Follow, judge, print; 1 where a guard asks to stop. However it ends, what was judged is on stdout where asked.

    Raises:
        UsageError: the log or the guards cannot be used.
        KeyboardInterrupt: passed on.
    """
    console, told = narration(), results(as_json=json_output)
    watch = Watch(DEFAULT_GUARDS if guards is None else load_guards(guards))
    known = _known(source, format_name, idle, every, console)
    console.print(f"Following {source}: {known.title}", soft_wrap=True)
    follower = Follower(known, source)
    course = _Course(watch, follower, source)
    try:
        course.follow(_steps(follower, idle, every, console), told)
    finally:
        for number in follower.unfinished:
            console.print(f"step {number} is not whole and was not judged", soft_wrap=True)
        if json_output:
            print_json(course.record())
    if course.stopped_at is not None:
        return ExitCode.GATE_FAILED
    if follower.trouble is not None:
        raise UsageError(follower.trouble)
    if course.is_broken:
        return ExitCode.ENVIRONMENT
    return ExitCode.PASS if any(step.metrics for step in course.steps) else ExitCode.INCONCLUSIVE


def _known(source: Path, name: str | None, idle: float | None, every: float, console: Console) -> Format:
    """The log's format; a folder that holds no file of one yet is waited for."""
    if name is not None:
        return recognise(source, name)
    until = None if idle is None else time.monotonic() + idle
    trouble = _Told(console)
    while True:
        try:
            return recognise(source)
        except UsageError as error:
            if not source.is_dir() or (until is not None and time.monotonic() >= until):
                raise
            trouble.say(f"waiting: {error}")
            time.sleep(every)


def _steps(follower: Follower, idle: float | None, every: float, console: Console) -> Iterator[LoggedStep]:
    """New steps as they come, until none has come for `idle` seconds."""
    last = time.monotonic()
    trouble, rewritten = _Told(console), 0
    while True:
        for step in follower.new_steps():
            yield step
            last = time.monotonic()
        for number in follower.rewritten[rewritten:]:
            console.print(
                f"step {number} was written again after it was judged, and is not judged again", soft_wrap=True
            )
        rewritten = len(follower.rewritten)
        trouble.say(None if follower.trouble is None else f"waiting: {follower.trouble}")
        if idle is not None and time.monotonic() - last >= idle:
            return
        time.sleep(every)


@dataclass
class _Told:
    """Says what is new, and nothing twice in a row."""

    console: Console
    last: str | None = None

    def say(self, text: str | None) -> None:
        if text is not None and text != self.last:
            self.console.print(text, soft_wrap=True)
        self.last = text


def _say_how_many_are_on(watch: Watch, console: Console) -> None:
    """Most guards are off, as a log has few of the metrics of a training loop: they are counted by what is absent."""
    off = Counter(_absent(lacking[0]) for lacking in watch.off.values())
    if not off:
        return
    counted = ", ".join(f"{what} ({write_count(number)})" for what, number in off.most_common())
    console.print(
        f"{write_count(watch.num_guards - off.total())} of {write_count(watch.num_guards)} guards judge this log. The "
        f"others are off, for want of: {counted}. --json lists them under guards_off",
        soft_wrap=True,
    )


def _absent(metric: str) -> str:
    return next(what for start, what in _ABSENT.items() if metric.startswith(start))


def _say(judged: JudgedStep, console: Console) -> None:
    shown = [f"{words} {_written(judged.metrics[name])}" for name, words in _SHOWN.items() if name in judged.metrics]
    counts = f"{write_many(judged.num_responses, 'response')}, {write_many(judged.num_tokens, 'token')}"
    console.print(f"step {judged.number}: {', '.join([counts, *shown])}", soft_wrap=True)
    for finding in judged.findings:
        console.print(f"  {finding.level.value}: {finding.sentence}", soft_wrap=True)
    if not judged.metrics:
        console.print("  not judged", soft_wrap=True)
    if judged.missing:
        console.print(f"  guards that read {', '.join(judged.missing)} could not judge it", soft_wrap=True)
    for event in judged.events:
        actions = ", ".join(map(str, event.actions))
        console.print(f"  {event.guard}: {event.sentence}; asks for {actions}", soft_wrap=True)


def _written(value: float) -> str:
    return write_number(value) if math.isfinite(value) else str(value)


def _recorded(judged: JudgedStep) -> WatchedStep:
    return WatchedStep(
        step=judged.number,
        num_responses=judged.num_responses,
        num_tokens=judged.num_tokens,
        metrics={
            name: value if math.isfinite(value) else str(value)  # type: ignore[misc]
            for name, value in judged.metrics.items()
        },
        findings=[finding.code for finding in judged.findings],
        events=[event.as_json() for event in judged.events],
    )
