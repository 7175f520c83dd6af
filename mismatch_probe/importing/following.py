"""A log that grows: each step once, as soon as it is whole."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import Format, LogFinding, Source
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
    `settled_seconds`. One that is written again after it was read is not read again: `rewritten` names it.
    """

    log: Format
    path: Path
    settled_seconds: float = SETTLED_SECONDS
    rewritten: list[int] = field(default_factory=list)
    _read: dict[int, float] = field(default_factory=dict)

    def new_steps(self) -> Iterator[LoggedStep]:
        """The steps that have become whole since the last call.

        Raises:
            UsageError: a file is of no step, or cannot be read.
        """
        sources = self._by_step()
        newest = max(sources, default=0)
        for step, files in sorted(sources.items()):
            modified = max(file.modified for file in files)
            if step in self._read:
                if modified > self._read[step] and step not in self.rewritten:
                    self.rewritten.append(step)
            elif self._is_whole(files, is_newest=step == newest):
                self._read[step] = modified
                yield self._step(step, files)

    def _by_step(self) -> dict[int, list[Source]]:
        try:
            sources = self.log.sources(self.path)
        except UsageError:
            if not self._read and not self.path.is_dir():
                raise
            return {}
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

    def _is_whole(self, files: list[Source], *, is_newest: bool) -> bool:
        if any(file.complete is False for file in files):
            return False
        said = all(file.complete is True for file in files)
        settled = time.time() - max(file.modified for file in files) > self.settled_seconds
        return said or not is_newest or settled

    def _step(self, step: int, files: list[Source]) -> LoggedStep:
        told: list[LogFinding] = []
        responses = [response for file in files for response in self.log.responses(file.path, told.append)]
        return LoggedStep(step, responses, told)
