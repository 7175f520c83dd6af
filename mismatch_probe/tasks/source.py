"""What a source of prompts means: `sums:long`, `sums:terms=9`, `prompts.jsonl`, `hub:owner/name:split`, `gym:name`."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS, PromptSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.tasks.files import READERS
from mismatch_probe.tasks.gym import GYM_PREFIX, gym_prompts
from mismatch_probe.tasks.hub import HUB_PREFIX, read_hub
from mismatch_probe.tasks.procedural import MAX_TERMS, TASKS, ProblemSet, Terms
from mismatch_probe.tasks.prompt import Prompt
from mismatch_probe.tasks.rows import Row, to_prompt

DEFAULT_SPLIT = "medium"
TERMS_KEY = "terms="


def load_prompts(settings: PromptSettings, seed: int = 0) -> list[Prompt]:
    """The first `settings.num_prompts` prompts of the source, in its order; `seed` makes built-in problems.

    Unset, that is DEFAULT_NUM_PROMPTS, or as many as a smaller source holds.

    Raises:
        UsageError: the source does not exist, is malformed, or holds fewer prompts than asked for.
        MissingExtra: a hub data set or a task of reasoning-gym is asked for, and its package is not installed.
    """
    wanted = settings.num_prompts or DEFAULT_NUM_PROMPTS
    if settings.source.partition(":")[0] in TASKS:
        return _built_in(parse_problem_set(settings.source, seed), wanted)
    if settings.source.startswith(GYM_PREFIX):
        return gym_prompts(settings.source, wanted, seed)
    rows = islice(_rows(settings.source), wanted)
    prompts = [to_prompt(f"row-{index}", row) for index, row in enumerate(rows)]
    if not prompts:
        raise UsageError(f"prompt source {settings.source} is empty; give --prompts a source with at least one prompt")
    if settings.num_prompts is not None and len(prompts) < wanted:
        raise UsageError(
            f"prompt source {settings.source} holds {len(prompts)} prompts, fewer than the {wanted} asked for; "
            f"give --num-prompts {len(prompts)}, or leave it out to use what there is"
        )
    return prompts


def parse_problem_set(source: str, seed: int) -> ProblemSet:
    """The problems that `TASK`, `TASK:SPLIT`, `TASK:terms=N` or `TASK:terms=N-M` names; `TASK` is its medium split.

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
        f"prompt source {source!r}: {task.name} has no split {split!r}; give --prompts {task.name}:SPLIT with one of "
        f"{', '.join(task.splits)}, or {task.name}:{TERMS_KEY}N"
    )


def _rows(source: str) -> Iterator[Row]:
    if source.startswith(HUB_PREFIX):
        return read_hub(source)
    path = Path(source).expanduser()
    if path.suffix in READERS:
        return READERS[path.suffix](path)
    raise UsageError(
        f"prompt source {source!r} is unknown; give --prompts a built-in task ({', '.join(TASKS)}), "
        f"a {' or '.join(READERS)} file, {HUB_PREFIX}OWNER/NAME[:SPLIT], or {GYM_PREFIX}NAME"
    )


def _parse_terms(source: str, value: str) -> Terms:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
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
