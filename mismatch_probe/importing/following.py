"""A log that grows, or a file of metrics: each of its steps is read once, as soon as the step is complete."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import Format, LogCode, LogFinding, NoLogError, Source
from mismatch_probe.logs.format import LeftOut, files_left_out
from mismatch_probe.logs.look import files_of, step_in_name
from mismatch_probe.logs.metric_files import FORMAT, MetricLog, read_metric_log
from mismatch_probe.notation import write_many
from mismatch_probe.reading import is_there
from mismatch_probe.records.sequences import LoggedResponse

SETTLED_SECONDS: Final = 5.0
"""A file that changed more recently may still grow, where its system never declares it finished."""
_HOW_TO_FOLLOW: Final = (
    "write a file a step (step_7.jsonl), or one file whose rows have a `step`; `import` reads the log as it is"
)
_PAUSE_SHARE: Final = 4.0
"""A file of all steps is read from its start each time, so it rests for so many times as long as that took."""


@dataclass(frozen=True)
class LoggedStep:
    """A step of a log."""

    number: int
    responses: list[LoggedResponse]
    findings: list[LogFinding]
    """What the reader left out."""


@dataclass(frozen=True)
class MetricStep:
    """A step of metrics alone."""

    number: int
    values: dict[str, float]
    """Under the trainer's names."""
    names: frozenset[str]
    """Those of the whole log so far."""


@dataclass
class _FilesOfStep:
    """The files of one step at one call."""

    readable: list[Source] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def all(self) -> list[Source]:
        return [*self.readable, *(file.source for file in self.left_out)]

    @property
    def modified(self) -> float:
        return max(source.modified for source in self.all)

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.all)


@dataclass(kw_only=True)
class Following:
    """What is known of a log that is followed, besides its steps."""

    settled_seconds: float = SETTLED_SECONDS
    rewritten: dict[int, int] = field(default_factory=dict)
    """The steps that changed after they were read, and the bytes that they grew by."""
    unfinished: dict[int, str] = field(default_factory=dict)
    """The steps that existed at the last call and are not complete, with the reason."""
    newest: int | None = None
    """The latest step that has a file to read."""
    vanished: list[int] = field(default_factory=list)
    """The steps whose files were removed before they were read."""
    left_out: list[str] = field(default_factory=list)
    """Sentences on the files without a step that cannot be read."""
    news: list[str] = field(default_factory=list)
    """Sentences on what happened to the files, as it happened."""
    has_unread_rows: bool = False
    """A file of all steps has changed, and rests before it is read again."""
    trouble: str | None = None
    """Why the folder could not be searched at the last call; None where it could."""
    has_no_log: bool = False
    """The folder could not be searched because no file in it is a log."""


@dataclass
class Follower(Following):
    """Reads the steps of a log: each step once, in order. Its files each belong to one step, or it is one file whose
    rows name their step.

    A step is complete where its system declares it finished, where a later step has begun, or where its files have not
    changed for `settled_seconds` and can be read to their last line. A file is read to the size that it has when it is
    opened. A step that changes after it was read is not read again.
    """

    log: Format
    path: Path
    _read_steps: dict[int, tuple[float, int]] = field(default_factory=dict)
    _cut_off_at: dict[int, float] = field(default_factory=dict)
    _num_rows: dict[int, int] = field(default_factory=dict)
    """The rows of each step of a file of all steps, as they were read."""
    _last_reading: tuple[float, int, bool] | None = None
    """When that file had changed at its last reading, its size, and whether it had settled."""
    _resting_until: float = 0.0

    @property
    def format_name(self) -> str:
        return self.log.name

    @property
    def title(self) -> str:
        return self.log.title

    def new_steps(self) -> Iterator[LoggedStep]:
        """The steps that have become complete since the last call."""
        by_step = self._files_by_step()
        if isinstance(by_step, Source):
            yield from self._steps_in_rows(by_step)
        elif by_step is not None:
            yield from self._steps_in_files(by_step)

    def _steps_in_files(self, by_step: dict[int, _FilesOfStep]) -> Iterator[LoggedStep]:
        earlier_unfinished, self.unfinished = self.unfinished, {}
        self.vanished += [step for step in earlier_unfinished if step not in by_step and step not in self.vanished]
        self.newest = max((step for step, files in by_step.items() if files.readable), default=None)
        for step, files in sorted(by_step.items()):
            if step in self._read_steps:
                modification_time, num_bytes = self._read_steps[step]
                if files.modified > modification_time and step not in self.rewritten:
                    self.rewritten[step] = files.num_bytes - num_bytes
                continue
            logged_step = self._complete_step(step, files)
            if isinstance(logged_step, str):
                self.unfinished[step] = logged_step
                continue
            self._read_steps[step] = files.modified, files.num_bytes
            if step in self.vanished:
                self.vanished.remove(step)
            yield logged_step

    def _steps_in_rows(self, file: Source) -> Iterator[LoggedStep]:
        """The steps of a file of all steps: one is complete where a row of another follows, the last where the file
        has settled and can be read to its last line.
        """
        has_settled = time.time() - file.modified > self.settled_seconds
        state = file.modified, file.num_bytes, has_settled
        has_news = state != self._last_reading
        self.has_unread_rows = has_news and time.monotonic() < self._resting_until
        if not has_news or self.has_unread_rows:
            return
        self._last_reading = state
        began, judging_seconds = time.monotonic(), 0.0
        findings: list[LogFinding] = []
        num_rows: Counter[int] = Counter()
        last: LoggedStep | None = None
        for response in self.log.responses(file.path, findings.append):
            step = _step_of_file(file) if response.step is None else response.step
            if step is None:
                raise UsageError(
                    f"{file.path} has no step in its name, and {response.where} names none; {_HOW_TO_FOLLOW}"
                )
            num_rows[step] += 1
            if last is not None and last.number != step:
                pause_start = time.monotonic()
                yield self._as_read(last)
                judging_seconds += time.monotonic() - pause_start
                last = None
            if step not in self._num_rows:
                last = last or LoggedStep(step, [], [])
                last.findings.extend(findings)
                last.responses.append(response)
            findings.clear()
        self._resting_until = time.monotonic() + _PAUSE_SHARE * (time.monotonic() - began - judging_seconds)
        self.rewritten |= {
            step: 0 for step, old in self._num_rows.items() if num_rows[step] > old and step not in self.rewritten
        }
        self.newest = None if last is None else last.number
        cut_off = next((finding.sentence for finding in findings if finding.code == LogCode.HALF_WRITTEN), None)
        self.unfinished, self.left_out = {}, []
        if last is None:
            self.left_out = [] if cut_off is None else [cut_off]
        elif cut_off is not None:
            self.unfinished[last.number] = cut_off
        elif not has_settled:
            self.unfinished[last.number] = _still_written(file.path, self.settled_seconds)
        else:
            yield self._as_read(last)

    def _as_read(self, step: LoggedStep) -> LoggedStep:
        self._num_rows[step.number] = len(step.responses)
        return step

    def _files_by_step(self) -> dict[int, _FilesOfStep] | Source | None:
        """The files of each step, or the one file of all steps; None where the folder cannot be searched."""
        try:
            sources = self.log.sources(self.path)
            sources_left_out = self.log.left_out(self.path, sources)
        except UsageError as error:
            self.trouble, self.has_no_log = str(error), isinstance(error, NoLogError)
            return None
        self.trouble, self.has_no_log = None, False
        by_step: dict[int, _FilesOfStep] = {}
        first, *others = sources
        if not others and (first.path == self.path or _step_of_file(first) is None):
            return first
        for source in sources:
            step = _step_of_file(source)
            if step is None:
                raise UsageError(
                    f"{source.path} has no step in its name, and is one of {len(sources)}; {_HOW_TO_FOLLOW}"
                )
            by_step.setdefault(step, _FilesOfStep()).readable.append(source)
        without_step = []
        for file in sources_left_out:
            step = _step_of_file(file.source)
            if step is None:
                without_step.append(file)
            else:
                by_step.setdefault(step, _FilesOfStep()).left_out.append(file)
        self.left_out = [f"{file.source.path} is left out: {file.why}" for file in without_step]
        return by_step

    def _complete_step(self, step: int, files: _FilesOfStep) -> LoggedStep | str:
        """The step, or the reason why more of it may still be written."""
        unfinished_file = next((file for file in files.all if file.complete is False), None)
        if unfinished_file is not None:
            return f"its system has not declared {unfinished_file.path} finished"
        are_complete = all(file.complete is True for file in files.all)
        may_grow = not are_complete and (self.newest is None or step >= self.newest)
        if may_grow and files.left_out:
            return f"{files.left_out[0].source.path}: {files.left_out[0].why}"
        if may_grow and self._cut_off_at.get(step) == files.modified:
            return f"the last line of {files.readable[-1].path} is cut off"
        if may_grow and time.time() - files.modified <= self.settled_seconds:
            return _still_written(files.readable[-1].path, self.settled_seconds)
        logged_step = self._read_step(step, files)
        if isinstance(logged_step, str):
            return logged_step
        cut_off = next((finding for finding in logged_step.findings if finding.code == LogCode.HALF_WRITTEN), None)
        if may_grow and cut_off is not None:
            self._cut_off_at[step] = files.modified
            return cut_off.sentence
        return logged_step

    def _read_step(self, step: int, files: _FilesOfStep) -> LoggedStep | str:
        """The step, or a sentence on a file of it that was removed in the meantime."""
        findings = [files_left_out(files.left_out)] if files.left_out else []
        responses: list[LoggedResponse] = []
        for file in files.readable:
            try:
                for response in self.log.responses(file.path, findings.append):
                    if response.step not in (None, step):
                        raise UsageError(
                            f"{response.where} is of step {response.step} in a file of step {step}; {_HOW_TO_FOLLOW}"
                        )
                    responses.append(response)
            except UsageError:
                if is_there(file.path):
                    raise
                return f"{file.path} went away while it was read"
        return LoggedStep(step, responses, findings)


def _step_of_file(source: Source) -> int | None:
    return step_in_name(source.path) if source.step is None else source.step


def _still_written(path: Path, seconds: float) -> str:
    return f"{path} was written to in the last {seconds:g} s"


_FileState = tuple[tuple[Path, int, int], ...]
"""Path, bytes and time in nanoseconds of each file."""


@dataclass
class MetricFollower(Following):
    """Reads the steps of metrics alone, of a file or of a folder of files of one kind.

    A step is complete where two later ones have begun, or one, or none for `settled_seconds` without a change, and it
    has all the names that the step before had. A last line that was cut off is waited for. The files are read from
    their start each time they change. Steps up to the newest that was read are not read again, whatever becomes of the
    files.
    """

    path: Path
    names: frozenset[str]
    """The names that are read."""
    kind: str = ""
    """What the files are, in words."""
    _read_steps: dict[int, dict[str, float]] = field(default_factory=dict)
    _absent_steps: frozenset[int] = frozenset()
    """The steps that were read and are no longer there."""
    _state: tuple[_FileState, bool] | None = None
    _resting_until: float = 0.0

    format_name = FORMAT

    @property
    def title(self) -> str:
        return f"metrics alone{f', {self.kind}' if self.kind else ''}"

    def new_steps(self) -> Iterator[MetricStep]:
        """The steps that have become complete since the last call."""
        try:
            log, has_settled = self._read()
        except UsageError as error:
            self.trouble, self._state = str(error), None
            return
        if log is None:
            return
        by_step: dict[int, dict[str, float]] = {}
        for name, values in log.series.items():
            for step, value in values.items():
                by_step.setdefault(step, {})[name] = value
        self._compare(by_step)
        self.newest = max(by_step)
        self.unfinished = {}
        steps = sorted(step for step in by_step if not self._read_steps or step > max(self._read_steps))
        for place, step in enumerate(steps):
            why_not = self._why_unfinished(by_step, steps[place:], log, has_settled=has_settled)
            if why_not is not None:
                self.unfinished = dict.fromkeys(steps[place:], why_not)
                break
            self._read_steps[step] = by_step[step]
            yield MetricStep(step, by_step[step], frozenset(log.series))

    def _read(self) -> tuple[MetricLog | None, bool]:
        """The metrics, and whether the files have settled; None where nothing is new or nothing is there yet.

        Raises:
            UsageError: as `read_metric_log`.
        """
        state = tuple((path, *_size_and_time(path)) for path in files_of(self.path))
        modified = max((nanoseconds for *_, nanoseconds in state), default=0) / 1e9
        has_settled = time.time() - modified > self.settled_seconds
        has_news = (state, has_settled) != self._state
        self.has_unread_rows = has_news and time.monotonic() < self._resting_until
        if not has_news or self.has_unread_rows:
            return None, has_settled
        began = time.monotonic()
        log = read_metric_log(self.path, must_be_metrics=True, names=self.names)
        self._resting_until = time.monotonic() + _PAUSE_SHARE * (time.monotonic() - began)
        self._state = state, has_settled
        self.has_no_log = log is None
        self.trouble = None if log else f"{self.path} has no metric of a known name yet"
        if log is not None:
            self.kind = log.kind
            self.left_out = [note for note in log.notes if note != log.cut_off]
        return log, has_settled

    def _compare(self, by_step: dict[int, dict[str, float]]) -> None:
        """Note the steps that were read and are no longer there, or have other numbers."""
        absent_steps = frozenset(self._read_steps.keys() - by_step.keys())
        if new := sorted(absent_steps - self._absent_steps):
            steps = f"{new[0]}" if len(new) == 1 else f"{new[0]} to {new[-1]}"
            self.news.append(
                f"{self.path} was replaced or cut short: it no longer has {write_many(len(new), 'step')} of those that "
                f"were judged ({steps})"
            )
        self._absent_steps = absent_steps
        for step, values in self._read_steps.items():
            if step not in self.rewritten and str(by_step.get(step, values)) != str(values):
                self.rewritten[step] = 0

    def _why_unfinished(
        self, by_step: dict[int, dict[str, float]], steps: list[int], log: MetricLog, *, has_settled: bool
    ) -> str | None:
        """Why more of the first of these steps may still be written; None where it is complete."""
        first, *later_steps = steps
        if len(later_steps) > 1:
            return None
        if not later_steps and log.cut_off is not None:
            return log.cut_off
        if not later_steps and not has_settled:
            return _still_written(log.files[-1], self.settled_seconds)
        last_values = self._read_steps[max(self._read_steps)] if self._read_steps else {}
        lacking = sorted(last_values.keys() - by_step[first].keys())
        return f"it has no {lacking[0]} yet, which the step before has" if lacking else None


def _size_and_time(path: Path) -> tuple[int, int]:
    """Of a file; zeros of one that went away."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
