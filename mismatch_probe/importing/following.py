"""A log that grows: each step once, as soon as it is whole."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import Format, LogCode, LogFinding, Source
from mismatch_probe.logs.files import step_in_name
from mismatch_probe.records.logged import LoggedResponse

SETTLED_SECONDS: Final = 5.0
"""A file that was written to more recently may grow, where its system never says that it wrote all of it."""


@dataclass(frozen=True)
class LoggedStep:
    """A step of a log. told: what its reader left out."""

    number: int
    responses: list[LoggedResponse]
    told: list[LogFinding]


@dataclass
class Follower:
    """Reads the steps of a log whose files each belong to one step, in their order, each of them once.

    A step is whole where its system says so, where a later one has begun, or where its files have not changed for
    `settled_seconds` and their last line is not cut off. One that is written again after it was read is not read
    again: `rewritten` names it. unfinished: the steps that were there at the last call and are not whole. trouble: why
    the folder could not be looked through at the last call, None where it could.
    """

    log: Format
    path: Path
    settled_seconds: float = SETTLED_SECONDS
    rewritten: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    trouble: str | None = None
    _read: dict[int, float] = field(default_factory=dict)
    _cut_off: dict[int, float] = field(default_factory=dict)

    def new_steps(self) -> Iterator[LoggedStep]:
        """The steps that have become whole since the last call.

        Raises:
            UsageError: a file is of no step or of several, or cannot be read.
        """
        sources = self._by_step()
        newest = max(sources, default=0)
        self.unfinished = []
        for step, files in sorted(sources.items()):
            modified = max(file.modified for file in files)
            if step in self._read:
                if modified > self._read[step] and step not in self.rewritten:
                    self.rewritten.append(step)
                continue
            logged = self._whole(step, files, modified, is_newest=step == newest)
            if logged is None:
                self.unfinished.append(step)
            else:
                self._read[step] = modified
                yield logged

    def _by_step(self) -> dict[int, list[Source]]:
        try:
            sources = self.log.sources(self.path)
        except UsageError as error:
            self.trouble = str(error)
            return {}
        self.trouble = None
        by_step: dict[int, list[Source]] = {}
        for source in sources:
            step = step_in_name(source.path) if source.step is None else source.step
            if step is None:
                raise UsageError(
                    f"{source.path} has no step in its name, so the log cannot be followed step by step; write a file "
                    "a step (step_7.jsonl), or have `import` read it as a whole"
                )
            by_step.setdefault(step, []).append(source)
        return by_step

    def _whole(self, step: int, files: list[Source], modified: float, *, is_newest: bool) -> LoggedStep | None:
        """The step; None where more of it may be written."""
        if any(file.complete is False for file in files):
            return None
        said = all(file.complete is True for file in files)
        settled = time.time() - modified > self.settled_seconds and self._cut_off.get(step) != modified
        if not (said or not is_newest or settled):
            return None
        logged = self._step(step, files)
        if is_newest and not said and any(finding.code == LogCode.HALF_WRITTEN for finding in logged.told):
            self._cut_off[step] = modified
            return None
        return logged

    def _step(self, step: int, files: list[Source]) -> LoggedStep:
        told: list[LogFinding] = []
        responses: list[LoggedResponse] = []
        for file in files:
            for response in self.log.responses(file.path, told.append):
                if response.step not in (None, step):
                    raise UsageError(
                        f"{response.where} is of step {response.step} in a file of step {step}, so the log cannot be "
                        "followed step by step; write a file a step (step_7.jsonl), or have `import` read it as a whole"
                    )
                responses.append(response)
        return LoggedStep(step, responses, told)
