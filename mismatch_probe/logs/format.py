"""A format: what writes it, what it holds, how it is recognised and read."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.errors import UsageError
from mismatch_probe.logs.look import FileKind, FileLook, NoLogError, Source, files_of, look_at, step_in_name
from mismatch_probe.logs.row import LogFinding, Tell
from mismatch_probe.records.sequences import LoggedResponse


class Holds(StrEnum):
    """Whose log-probs a format can hold, the most telling first."""

    BOTH_SIDES = "both sides"
    SAMPLER = "the engine's side"
    PROMPTS = "prompts only"
    NOTHING = "nothing"


PromptFileRow = dict[str, Any]
"""A row of a prompt file: `prompt`, a text or messages, and `answer` where the log has one."""


_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class LeftOut:
    """A file of a log's folder that is not read, and why, as the end of a sentence."""

    source: Source
    why: str


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one system writes its rollouts; a package brings one in the entry points `mismatch_probe.log_formats`, under
    the name that `--format` gives.

        def _responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
            for row in read_lines(path, tell):
                ids = row.ids("output")
                log_mu = row.optional_numbers("logp", ids.size)
                yield LoggedResponse(row.where, row.ids("prompt"), ids, np.ones(ids.size, np.bool_), log_mu)

        MINE = Format(
            name="mine",
            title="my trainer's log",
            holds=Holds.SAMPLER,
            fits=lambda look: look.lines_with("prompt", "output", "logp"),
            responses=_responses,
        )
    """

    name: str
    title: str
    """What a sentence calls it."""
    holds: Holds
    """Whose log-probs it can hold."""
    fits: Callable[[FileLook], bool]
    """Whether a file is of this format, by its content."""
    responses: Callable[[Path, Tell], Iterator[LoggedResponse]] = lambda path, tell: iter(())
    """Those of one file, in order, a few at a time in memory; the callback gets what is left out."""
    prompts: Callable[[Path, Tell], Iterator[PromptFileRow]] | None = None
    """Those of one file of texts, one for each response; None for a format without texts."""
    why_not: str | None = None
    """Why a format has no responses that can be read, and what to do instead."""
    step_of: Callable[[Path], int | None] = step_in_name
    """The step of a file, where its name or its folder has it."""
    complete: Callable[[Path], bool | None] = lambda path: None
    """Whether the system declared a file finished; None where it never does."""

    def files(self, path: Path) -> list[Path]:
        """The files at or below `path` that are of this format; a single file is taken at its word.

        Raises:
            NoLogError: none of the files of the folder is of this format.
            UsageError: nothing is there.
        """
        files = files_of(path)
        if files == [path]:
            return files
        fitting = [file for file in files if self.fits(look_at(file))]
        if not fitting:
            raise NoLogError(f"none of the {len(files)} files below {path} is {self.title}; give --format another")
        return fitting

    def sources(self, path: Path) -> list[Source]:
        """What `read` reads, in that order. Raises as `files`."""
        return [self._source(file) for file in self.files(path)]

    def left_out(self, path: Path, sources: list[Source]) -> list[LeftOut]:
        """Files beside `sources` with an ending of theirs that cannot be read, or are called as they are but for the
        numbers and hold something else. Raises as `files`.
        """
        paths = {source.path for source in sources}
        endings, names = {file.suffix for file in paths}, set(map(_without_numbers, paths))
        left_out = []
        for file in files_of(path):
            if file in paths or file.suffix not in endings:
                continue
            look = look_at(file)
            why = look.why_other
            if look.kind is not FileKind.OTHER and _without_numbers(file) in names:
                why = f"it holds something other than {self.title}"
            if why is not None:
                left_out.append(LeftOut(self._source(file), why))
        return left_out

    def read(self, path: Path, tell: Tell, on_file: Callable[[], None] = lambda: None) -> Iterator[LoggedResponse]:
        """The responses of every file at or below `path`, a few at a time in memory; `tell` hears what is left out,
        `on_file` that a file is begun.

        Raises:
            UsageError: as `files`; the format has no responses; a file is not what it should be.
        """
        if self.why_not:
            raise UsageError(f"{path} is {self.title}, from which {self.holds} can be used: {self.why_not}")
        sources = self.sources(path)
        left_out = self.left_out(path, sources)
        if left_out:
            tell(files_left_out(left_out))
        unfinished_steps: set[int | None] = set()
        for source in sources:
            if source.complete is False and source.step not in unfinished_steps:
                unfinished_steps.add(source.step)
                evidence = {"file": str(source.path), "step": source.step}
                tell(LogFinding.of(LogCode.UNFINISHED_STEP, evidence=evidence, step=source.step))
            on_file()
            yield from self.responses(source.path, tell)

    def read_prompts(self, path: Path, tell: Tell) -> Iterator[PromptFileRow]:
        """Each prompt of a log of texts once, as a row of a prompt file.

        Raises:
            UsageError: as `files`; the format has no texts; a file is not what it should be.
        """
        if self.prompts is None:
            raise UsageError(f"{path} is {self.title}, which has no texts of prompts")
        steps: set[int] = set()
        for source in self.sources(path):
            for prompt in self.prompts(source.path, tell):
                key = hash(repr(prompt["prompt"]))
                if key not in steps:
                    steps.add(key)
                    yield prompt

    def _source(self, file: Path) -> Source:
        try:
            status = file.stat()
        except OSError as error:
            raise UsageError(f"the log {file} cannot be read ({error.strerror}); put it back") from error
        return Source(file, status.st_size, status.st_mtime, self.step_of(file), self.complete(file))


def files_left_out(files: Sequence[LeftOut]) -> LogFinding:
    """The findings on them, each with its place in words."""
    words = "; ".join(f"{file.source.path}: {file.why}" for file in files[:_MOST_NAMED])
    more = f"; and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
    count = f"{len(files)} files cannot be read and are" if len(files) > 1 else "a file cannot be read and is"
    paths = [str(file.source.path) for file in files]
    return LogFinding.of(LogCode.UNREADABLE_FILES, evidence={"files": paths}, number=count, files=f"{words}{more}")


def _without_numbers(file: Path) -> str:
    return re.sub(r"\d+", "0", str(file))
