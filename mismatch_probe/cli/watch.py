"""`mismatch-probe watch LOG`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mismatch_probe.cli import options
from mismatch_probe.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch_probe.cli.watch_course import WatchCourse
    from mismatch_probe.guards.rules.base import GuardSettings
    from mismatch_probe.importing.following import Follower, MetricFollower
    from mismatch_probe.importing.watching import JudgedStep, StepWatch


def watch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="Folder that a training run writes its log into, one file whose rows have a `step`, or metrics alone.",
        ),
    ],
    guards: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of guards; the built-in guards unless given. `mismatch-probe init guards` writes one."
        ),
    ] = None,
    format: options.LogFormat = None,
    idle: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="End after so many seconds without a new step; with 0, after the steps that are there now.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Look for new steps every so many seconds.")
    ] = 2.0,
    unjudged: Annotated[
        int,
        typer.Option(
            min=0, metavar="STEPS", help="End after so many steps in a row that could not be judged; with 0, never."
        ),
    ] = 3,
    unjudged_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="The largest share of the steps that may be unjudged at the end."
        ),
    ] = 0.1,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Follow the log of a training run, and print at each step what the guards say of it.

    It ends with 1 at the step where a guard asks to stop, and with 3 after --unjudged steps in a row that could not be
    judged. After --idle seconds without a new step it ends with 1 where a guard asked for more than a warning, with 3
    where no step or too few could be judged, with 4 where the numbers of a step mean nothing, and else with 0.
    """
    from mismatch_probe.cli.output import narration, print_json, results
    from mismatch_probe.cli.watch_course import WatchCourse
    from mismatch_probe.guards.rules import DEFAULT_GUARDS, load_guards
    from mismatch_probe.importing.watch_outcome import Patience, Tally
    from mismatch_probe.importing.watching import StepWatch
    from mismatch_probe.report.screen import print_line

    console, screen = narration(), results(as_json=json_output)
    settings = DEFAULT_GUARDS if guards is None else load_guards(guards)
    course = WatchCourse(StepWatch(settings), source, Tally(Patience(unjudged, unjudged_share)))
    is_refused = False
    try:
        course.follower = _follower(source, format, idle, every, console, settings)
        if course.follower is not None:
            print_line(console, f"Following {source}: {course.follower.title}")
            course.watch, judged_steps = _judged_steps(course.follower, settings, source, idle, every, console)
            course.follow(judged_steps, screen)
            _require_to_the_end(course)
        course.has_ended = True
    except UsageError:
        is_refused = not course.steps
        raise
    finally:
        if course.has_ended or (course.follower is not None and not is_refused):
            course.end(screen)
            if json_output:
                print_json(course.record())
    return course.tally.code


@dataclass
class _News:
    """Says what is new, and nothing twice in a row."""

    console: Console
    last: str | None = None

    def say(self, text: str | None) -> None:
        from mismatch_probe.report.screen import print_line

        if text is not None and text != self.last:
            print_line(self.console, text)
        self.last = text


def _require_to_the_end(course: WatchCourse) -> None:
    """
    Raises:
        UsageError: the folder could not be looked through at the end, and no guard asked to stop before.
    """
    follower = course.follower
    if follower is None or follower.trouble is None or course.tally.stopped_at is not None:
        return
    if course.steps or not follower.has_no_log:
        raise UsageError(follower.trouble)


def _follower(
    source: Path,
    name: str | None,
    idle: float | None,
    every: float,
    console: Console,
    guards: tuple[GuardSettings, ...],
) -> Follower | MetricFollower | None:
    """Of the log's format, or of metrics alone; a folder that holds no file of one yet, and a text without a step, are
    waited for, None where a folder held none to the end.

    Raises:
        UsageError: there is no such folder, or what it holds cannot be followed.
    """
    from mismatch_probe.importing.following import Follower, MetricFollower
    from mismatch_probe.importing.metrics import names_to_follow
    from mismatch_probe.logs import NoLogError, recognise
    from mismatch_probe.logs.look import files_of
    from mismatch_probe.logs.metric_files import FORMAT, has_half_a_step, may_become_metrics, read_metric_log
    from mismatch_probe.report.screen import print_line

    names = names_to_follow(guards)
    if name == FORMAT:
        files_of(source)
        return MetricFollower(source, names)
    if name is not None:
        files_of(source)
        return Follower(recognise(source, name), source)
    until = None if idle is None else time.monotonic() + idle
    trouble = _News(console)
    while True:
        # Looked at before it is read, since it grows.
        is_half_written = source.is_file() and has_half_a_step(source)
        may_come = is_half_written or source.is_dir() or may_become_metrics(source)
        try:
            return Follower(recognise(source), source)
        except UsageError as error:
            log = None
            try:
                if isinstance(error, NoLogError) or source.is_file():
                    log = read_metric_log(source, names=names)
            except UsageError:
                if not is_half_written:
                    raise
            if log is not None:
                return MetricFollower(source, names, log.kind)
            is_over = until is not None and time.monotonic() >= until
            if not may_come or (is_over and not isinstance(error, NoLogError)):
                raise
            if is_over:
                print_line(console, str(error))
                return None
            trouble.say(f"waiting: {error}")
            time.sleep(every)


def _judged_steps(
    follower: Follower | MetricFollower,
    guards: tuple[GuardSettings, ...],
    source: Path,
    idle: float | None,
    every: float,
    console: Console,
) -> tuple[StepWatch, Iterator[JudgedStep]]:
    """What judges the steps, and the steps as they are judged."""
    from mismatch_probe.importing.following import Follower
    from mismatch_probe.importing.metrics import MetricWatch
    from mismatch_probe.importing.watching import Watch

    if isinstance(follower, Follower):
        watch = Watch(guards)
        return watch, map(watch.judge, _steps(follower, follower.new_steps, idle, every, console))
    metric_watch = MetricWatch(guards, source)
    return metric_watch, map(metric_watch.judge, _steps(follower, follower.new_steps, idle, every, console))


_Step = TypeVar("_Step")


def _steps(
    follower: Follower | MetricFollower,
    new_steps: Callable[[], Iterator[_Step]],
    idle: float | None,
    every: float,
    console: Console,
) -> Iterator[_Step]:
    """New steps as they come, until none has come for `idle` seconds."""
    from mismatch_probe.notation import write_count
    from mismatch_probe.report.screen import print_line

    last = time.monotonic()
    trouble, rewritten = _News(console), 0
    while True:
        for step in new_steps():
            yield step
            last = time.monotonic()
        while follower.news:
            print_line(console, follower.news.pop(0))
        for number, num_bytes in list(follower.rewritten.items())[rewritten:]:
            growth = f" ({write_count(num_bytes)} bytes more)" if num_bytes > 0 else ""
            print_line(
                console, f"step {number} was written to again after it was judged{growth}, and is not judged again"
            )
        rewritten = len(follower.rewritten)
        trouble.say(None if follower.trouble is None else f"waiting: {follower.trouble}")
        if idle is not None and time.monotonic() - last >= idle and not follower.has_unread_rows:
            return
        time.sleep(every)
