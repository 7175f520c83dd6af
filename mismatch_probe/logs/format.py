"""A format: what writes it, what it holds, how it is recognised and read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.files import Source, files_of, step_in_name
from mismatch_probe.logs.findings import Level, LogCode, LogFinding, Tell
from mismatch_probe.logs.look import Look, look_at
from mismatch_probe.records.logged import LoggedResponse


class Holds(StrEnum):
    """Whose log-probs a format can hold, the most telling first."""

    BOTH_SIDES = "both sides"
    SAMPLER = "the sampler's side"
    PROMPTS = "prompts only"
    NOTHING = "nothing"


Prompt = dict[str, Any]
"""A row of a prompt file: `prompt`, a text or messages, and `answer` where the log has one."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one system writes its rollouts.

    title: how a sentence names it. fits: whether a file is of this format, told from its content. responses: those of
    one file, in order. prompts: those of one file of texts, one for each response. why_not: why a format has no
    responses that can be read, and what to do instead.
    """

    name: str
    title: str
    holds: Holds
    fits: Callable[[Look], bool]
    responses: Callable[[Path, Tell], Iterator[LoggedResponse]] = lambda path, tell: iter(())
    prompts: Callable[[Path, Tell], Iterator[Prompt]] | None = None
    why_not: str | None = None
    step_of: Callable[[Path], int | None] = step_in_name
    complete: Callable[[Path], bool | None] = lambda path: None

    def files(self, path: Path) -> list[Path]:
        """The files at or below `path` that are of this format; a single file is taken at its word.

        Raises:
            UsageError: nothing is there, or none of the files is of this format.
        """
        there = files_of(path)
        if there == [path]:
            return there
        fitting = [file for file in there if self.fits(look_at(file))]
        if not fitting:
            raise UsageError(f"none of the {len(there)} files below {path} is {self.title}; give --format another")
        return fitting

    def sources(self, path: Path) -> list[Source]:
        """What `read` reads, in that order. Raises as `files`."""
        return [self._source(file) for file in self.files(path)]

    def read(self, path: Path, tell: Tell, on_file: Callable[[], None] = lambda: None) -> Iterator[LoggedResponse]:
        """The responses of every file at or below `path`, a few at a time in memory; `tell` hears what is left out,
        `on_file` that a file is begun.

        Raises:
            UsageError: as `files`; the format has no responses; a file is not what it should be.
        """
        if self.why_not:
            raise UsageError(f"{path} is {self.title}, from which {self.holds} can be used: {self.why_not}")
        sources = self.sources(path)
        unreadable = _unreadable_beside(path, sources)
        if unreadable:
            tell(_left_out(unreadable))
        unfinished: set[int | None] = set()
        for source in sources:
            if source.complete is False and source.step not in unfinished:
                unfinished.add(source.step)
                tell(_unfinished(source))
            on_file()
            yield from self.responses(source.path, tell)

    def read_prompts(self, path: Path, tell: Tell) -> Iterator[Prompt]:
        """Each prompt of a log of texts once, as a row of a prompt file.

        Raises:
            UsageError: as `files`; the format has no texts; a file is not what it should be.
        """
        if self.prompts is None:
            raise UsageError(f"{path} is {self.title}, which has no texts of prompts")
        seen: set[int] = set()
        for source in self.sources(path):
            for prompt in self.prompts(source.path, tell):
                key = hash(repr(prompt["prompt"]))
                if key not in seen:
                    seen.add(key)
                    yield prompt

    def _source(self, file: Path) -> Source:
        try:
            status = file.stat()
        except OSError as error:
            raise UsageError(f"the log {file} cannot be read ({error.strerror}); put it back") from error
        return Source(file, status.st_size, status.st_mtime, self.step_of(file), self.complete(file))


def _unreadable_beside(path: Path, sources: list[Source]) -> list[Path]:
    """Files with the endings of `sources` in which nothing could be seen; those without content are no loss."""
    taken = {source.path for source in sources}
    endings = {file.suffix for file in taken}
    others = [file for file in files_of(path) if file.suffix in endings and file not in taken]
    return [file for file in others if look_at(file).why_other is not None and file.stat().st_size]


def _left_out(files: list[Path]) -> LogFinding:
    return LogFinding(
        code=LogCode.UNREADABLE_FILES,
        sentence=f"{len(files)} files cannot be read and are left out, the first {files[0]}: "
        f"{look_at(files[0]).why_other}",
        level=Level.WARNING,
        evidence={"files": [str(file) for file in files]},
    )


def _unfinished(source: Source) -> LogFinding:
    return LogFinding(
        code=LogCode.UNFINISHED_STEP,
        sentence=f"step {source.step} was not declared finished by its system: rows of it may be missing",
        level=Level.WARNING,
        evidence={"file": str(source.path), "step": source.step},
    )
