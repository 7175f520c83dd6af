"""What a source of prompts means: `sums:long`, `prompts.jsonl`, `hub:owner/name:split`, `gym:name`.

A reader is told the flag that named its file.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS, PromptSettings
from mismatch_probe.errors import MissingExtra, UsageError, said
from mismatch_probe.reading import Unreadable, as_object, expanded, opened, opened_text, parse_json, require_text
from mismatch_probe.tasks.problems import (
    GYM_PREFIX,
    MAX_TERMS,
    TASKS,
    ProblemSet,
    Prompt,
    PromptRow,
    Terms,
    gym_prompts,
    to_prompt,
)


def read_jsonl(path: Path, flag: str) -> Iterator[PromptRow]:
    """One JSON object a line; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with opened_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


def read_parquet(path: Path, flag: str) -> Iterator[PromptRow]:
    """One row of the table a prompt; batches are read as they are needed.

    Raises:
        UsageError: the file cannot be read or is no parquet.
    """
    try:
        with opened(path) as file:
            for number, columns in enumerate(_table_rows(path, file)):
                yield PromptRow(f"row {number} of {path}", columns)
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


def _table_rows(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompt file {path} is no readable parquet: {said(error)}") from error


READERS: dict[str, Callable[[Path, str], Iterator[PromptRow]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}


def _parse_line(path: Path, number: int, line: str) -> PromptRow:
    where = f"line {number} of {path}"
    try:
        columns = as_object(parse_json(line))
        require_text(json.dumps(columns, ensure_ascii=False))
    except Unreadable as error:
        raise UsageError(f"{where} cannot be read ({error}); mend or remove it") from error
    return PromptRow(where, columns)


def _unreadable(path: Path, flag: str, error: Exception) -> UsageError:
    reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
    return UsageError(f"prompt file {path} cannot be read ({reason}); mend it, or give {flag} another")


HUB_PREFIX = "hub:"


def read_hub(source: str, flag: str) -> Iterator[PromptRow]:
    """The rows of one split (`train` unless named); a local folder of data files works as well as a hub id.

    `flag` is what named it.

    Raises:
        MissingExtra: `datasets` is not installed.
        UsageError: the data set or the split cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra(
            f"prompt source {source} needs the package datasets, which is not installed; "
            "run pip install 'mismatch-probe[datasets]'"
        ) from error
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UsageError(f"prompt source {source!r} names no data set; give {flag} {HUB_PREFIX}OWNER/NAME[:SPLIT]")
    try:
        data = load_dataset(name, split=split or "train", streaming=True)
        for number, columns in enumerate(data):
            yield PromptRow(f"row {number} of {source}", columns)
    except (ValueError, OSError, LookupError) as error:
        raise UsageError(
            f"prompt source {source} cannot be loaded ({said(error)}); "
            f"give {flag} {HUB_PREFIX}OWNER/NAME:SPLIT of a data set that can be reached"
        ) from error


DEFAULT_SPLIT = "medium"
TERMS_KEY = "terms="


@dataclass(frozen=True)
class Asking:
    """How a command asks for prompts: with which flags, and for how many where no number is given.

    made: of a task that makes them. held: of a source that has them, or all of a smaller one; None: all of any.
    """

    flag: str = "--prompts"
    count_flag: str = "--num-prompts"
    made: int = DEFAULT_NUM_PROMPTS
    held: int | None = DEFAULT_NUM_PROMPTS


COMPARING: Final = Asking()


def load_prompts(settings: PromptSettings, seed: int = 0, asking: Asking = COMPARING) -> list[Prompt]:
    """The first `settings.num_prompts` prompts of the source, in its order, or, unset, as many as `asking` says.

    `seed` makes the problems of tasks that make them.

    Raises:
        UsageError: the source does not exist, is malformed, or holds fewer prompts than asked for.
        MissingExtra: a hub data set or a task of reasoning-gym is asked for, and its package is not installed.
    """
    made, held = settings.num_prompts or asking.made, settings.num_prompts or asking.held
    if settings.source.partition(":")[0] in TASKS:
        return _built_in(parse_problem_set(settings.source, seed, asking.flag), made)
    if settings.source.startswith(GYM_PREFIX):
        return gym_prompts(settings.source, made, seed)
    rows = islice(_rows(settings.source, asking.flag), held)
    prompts = [to_prompt(f"row-{index}", row) for index, row in enumerate(rows)]
    if not prompts:
        raise UsageError(
            f"prompt source {settings.source} is empty; give {asking.flag} a source with at least one prompt"
        )
    if settings.num_prompts is not None and len(prompts) < settings.num_prompts:
        raise UsageError(
            f"prompt source {settings.source} holds {len(prompts)} prompts, fewer than the {settings.num_prompts} "
            f"asked for; give {asking.count_flag} {len(prompts)}, or leave it out to use what there is"
        )
    return prompts


def num_held(source: str, most: int) -> int | None:
    """How many prompts a source has, counted up to `most`; None for one that makes as many as are asked for.

    Raises:
        UsageError: the source does not exist or is malformed.
        MissingExtra: a hub data set is asked for, and its package is not installed.
    """
    if source.partition(":")[0] in TASKS or source.startswith(GYM_PREFIX):
        return None
    return sum(1 for _ in islice(_rows(source, COMPARING.flag), most))


def parse_problem_set(source: str, seed: int, flag: str) -> ProblemSet:
    """The problems that `TASK`, `TASK:SPLIT`, `TASK:terms=N` or `TASK:terms=N-M` names; `TASK` is its medium split.

    `flag` is what named it.

    Raises:
        UsageError: no such split or parameter, or a number of terms out of range.
    """
    task_name, _, selection = source.partition(":")
    task = TASKS[task_name]
    split = selection or DEFAULT_SPLIT
    if split in task.splits:
        return ProblemSet(task, task.splits[split], seed)
    if split.startswith(TERMS_KEY):
        return ProblemSet(task, _parse_terms(source, split.removeprefix(TERMS_KEY)), seed)
    raise UsageError(
        f"prompt source {source!r}: {task.name} has no split {split!r}; give {flag} {task.name}:SPLIT with one of "
        f"{', '.join(task.splits)}, or {task.name}:{TERMS_KEY}N"
    )


def _rows(source: str, flag: str) -> Iterator[PromptRow]:
    if source.startswith(HUB_PREFIX):
        return read_hub(source, flag)
    try:
        path = expanded(source)
    except Unreadable as error:
        raise UsageError(f"prompt source {source!r} cannot be read ({error}); give {flag} another path") from error
    if path.suffix in READERS:
        return READERS[path.suffix](path, flag)
    raise UsageError(
        f"prompt source {source!r} is unknown; give {flag} a built-in task ({', '.join(TASKS)}), "
        f"a {' or '.join(READERS)} file, {HUB_PREFIX}OWNER/NAME[:SPLIT], or {GYM_PREFIX}NAME"
    )


def _parse_terms(source: str, value: str) -> Terms:
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", value, flags=re.ASCII)
    if match is not None:
        terms = Terms(int(match[1]), int(match[2] or match[1]))
        if 2 <= terms.low <= terms.high <= MAX_TERMS:
            return terms
    raise UsageError(
        f"prompt source {source!r}: {TERMS_KEY}{value} cannot be used; "
        f"give {TERMS_KEY}N or {TERMS_KEY}N-M within 2-{MAX_TERMS}"
    )


def _built_in(problems: ProblemSet, num_prompts: int) -> list[Prompt]:
    return [_problem_prompt(problems, index) for index in range(num_prompts)]


def _problem_prompt(problems: ProblemSet, index: int) -> Prompt:
    problem = problems.problem(index)
    task = problems.task.name
    return Prompt(f"{task}-{index}", text=problem.question, answer=problem.answer, task=task)
