"""Prompts as their source gives them, and problems that are made: built-in tasks, those of reasoning-gym."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.reading import Unreadable, expand_user, open_file
from mismatch_probe.records.sequences import EncodedPrompt, prompt_label

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Exactly one of `text`, `messages` and `token_ids` is set; messages may have `images`, paths in their order.

    `prompt_id` is unique within its source and depends on the prompt's place there, never on how many are read.
    `task` names the task that checks responses itself, built-in or reasoning-gym's; prompts of files have none. `where`
    is the place in the source of one that was read (`line 3 of FILE`).
    """

    prompt_id: str
    text: str | None = None
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    answer: str | None = None
    task: str | None = None
    images: list[str] = field(default_factory=list)
    where: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        forms = [form for form in (self.text, self.messages, self.token_ids) if form is not None]
        if len(forms) != 1:
            raise ValueError(f"prompt {self.prompt_id}: exactly one of text, messages and token_ids must be given")

    @property
    def label(self) -> str:
        """How a sentence names it."""
        return prompt_label(self.prompt_id, self.where)


_LARGEST_ID = 2**31
PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True)
class PromptRow:
    """A row's columns, where it stands (`line 3 of FILE`), and the folder that its paths begin in."""

    where: str
    columns: dict[str, Any]
    folder: Path = Path()


def to_prompt(prompt_id: str, row: PromptRow) -> Prompt:
    """Read a row that has exactly one of `prompt` (text or messages), `messages` and `prompt_token_ids`.

    The answer is `answer`, or verl's `reward_model.ground_truth`. A conversation's last assistant turn is no prompt
    and is left off.

    Raises:
        UsageError: no such column or several, or one that holds something else.
    """
    columns = [name for name in PROMPT_COLUMNS if row.columns.get(name) is not None]
    if len(columns) != 1:
        reason = f"has both {' and '.join(columns)}" if columns else f"has no prompt (its columns: {_names(row)})"
        raise UsageError(f"{row.where} {reason}; give each row exactly one of {', '.join(PROMPT_COLUMNS)}")
    value, answer = row.columns[columns[0]], _answer_of_row(row)
    if columns[0] == "prompt_token_ids":
        return Prompt(prompt_id, token_ids=_token_ids(row, value), answer=answer, where=row.where)
    if columns[0] == "prompt" and isinstance(value, str):
        return Prompt(prompt_id, text=value, answer=answer, where=row.where)
    messages, images = _with_images(row, _messages_of_value(row, columns[0], value))
    return Prompt(prompt_id, messages=messages, answer=answer, images=images, where=row.where)


def _names(row: PromptRow) -> str:
    return ", ".join(row.columns) or "none"


def _answer_of_row(row: PromptRow) -> str | None:
    reward_model = row.columns.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    answer = row.columns.get("answer", ground_truth)
    return None if answer is None else str(answer)


def _token_ids(row: PromptRow, value: Any) -> list[int]:
    if isinstance(value, list) and all(type(token_id) is int and 0 <= token_id < _LARGEST_ID for token_id in value):
        return value
    raise UsageError(f"{row.where}: prompt_token_ids is no list of token ids; give whole numbers of the vocabulary")


def _messages_of_value(row: PromptRow, column: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not all(
        isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value
    ):
        forms = "messages" if column == "messages" else "text or messages"
        raise UsageError(f"{row.where}: {column} is no {forms}; a message is an object with role and content")
    turns = value[:-1] if value and value[-1]["role"] == "assistant" else value
    if not turns:
        raise UsageError(f"{row.where}: {column} has no turn to answer; give at least one user message")
    return [{key: part for key, part in turn.items() if part is not None} for turn in turns]


_IMAGE_PARTS: Final = ("image", "image_url", "input_image")
_PATH_KEYS: Final = ("image", "image_url", "url", "path")
_FILE: Final = "file://"
_NOT_A_FILE: Final = ("http://", "https://", "data:")


def _with_images(row: PromptRow, turns: list[Message]) -> tuple[list[Message], list[str]]:
    """The messages with `{"type": "image"}` for each image, as templates know it, and the paths of the images.

    A part without a path takes the next one of the row's column `images`.
    """
    column = row.columns.get("images")
    more_paths = list(column) if isinstance(column, list) else []
    paths: list[str] = []

    def part_of(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("video", "audio", "input_audio", "video_url"):
            raise UsageError(f"{row.where} holds a part of the type {kind}, and images alone are compared; remove it")
        if kind not in _IMAGE_PARTS:
            return part
        value = next((part[key] for key in _PATH_KEYS if part.get(key) is not None), None)
        paths.append(_image_path(row, more_paths.pop(0) if value is None and more_paths else value))
        return {"type": "image"}

    messages = [
        {**turn, "content": [part_of(part) for part in turn["content"]]}
        if isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]
    if more_paths and paths:
        raise UsageError(
            f"{row.where} names {len(paths) + len(more_paths)} images and its messages have {len(paths)} parts of the "
            "type image; give each image a part"
        )
    return messages, paths


def _image_path(row: PromptRow, value: Any) -> str:
    name = value.get("url") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name or name.startswith(_NOT_A_FILE):
        raise UsageError(
            f"{row.where}: an image is read from a file, and its part names none; give the path in its key image, "
            "from the folder of the prompt file on"
        )
    try:
        path = row.folder.absolute() / expand_user(name.removeprefix(_FILE))
        with open_file(path):
            return str(path)
    except (FileNotFoundError, Unreadable) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
        raise UsageError(f"{row.where}: the image {name} cannot be read ({reason}); fix its path") from error


GYM_PREFIX: Final = "gym:"
INSTRUCTION: Final = "\n\nGive the final answer between <answer> and </answer>."


def gym_prompts(source: str, num_prompts: int, seed: int) -> list[Prompt]:
    """Problems of `gym:NAME` under its default settings, each asking for its answer in tags.

    Raises:
        MissingExtra: reasoning-gym is not installed.
        UsageError: it has no task of that name, or one that its defaults cannot make.
    """
    name = source.removeprefix(GYM_PREFIX)
    task = f"{GYM_PREFIX}{name}:{num_prompts}:{seed}"
    _, problems = _make_rows(task)
    return [
        Prompt(
            f"{name}-{index}",
            text=problem["question"] + INSTRUCTION,
            answer=None if problem["answer"] is None else str(problem["answer"]),
            task=task,
        )
        for index, problem in enumerate(problems)
    ]


def gym_scorer(task: str) -> Callable[[EncodedPrompt, str], float]:
    """reasoning-gym's score, from 0 to 1, of what stands in a response's last answer tags, else of the whole response.

    `task` is that of the prompts. Scorers raise on texts that they cannot read as an answer: those score 0. That they
    run at all is tried here, on each problem's own answer.

    Raises:
        MissingExtra: reasoning-gym is not installed.
        UsageError: the scorer raises on an answer that reasoning-gym gave.
    """
    maker, problems = _make_rows(task)
    for problem in problems:
        if problem["answer"] is not None:
            try:
                maker.score_answer(answer=str(problem["answer"]), entry=problem)
            except Exception as error:  # a third party's program
                raise UsageError(
                    f"task {task}: its scorer raised {type(error).__name__} ({error}) on its own answer "
                    f"{problem['answer']!r}; choose another task or another version of reasoning-gym"
                ) from error

    def score(prompt: EncodedPrompt, text: str) -> float:
        problem = problems[int(prompt.prompt_id.rpartition("-")[2])]
        tags = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
        try:
            return float(maker.score_answer(answer=(tags[-1] if tags else text).strip(), entry=problem))
        except Exception:  # noqa: BLE001 - on its own answers it runs, so it is the text that it cannot read
            return 0.0

    return score


def _make_rows(task: str) -> tuple[Any, list[dict[str, Any]]]:
    """The data set of `gym:NAME:SIZE:SEED` and its problems; some tasks make other problems at another size."""
    name, size, seed = task.removeprefix(GYM_PREFIX).rsplit(":", 2)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise MissingExtra(
            f"task {GYM_PREFIX}{name} needs the package reasoning-gym, which is not installed; "
            "run `pip install 'mismatch-probe[gym]'`"
        ) from error
    if name not in DATASETS:
        close_names = get_close_matches(name, DATASETS, n=1)
        suggestion = (
            f"did you mean {GYM_PREFIX}{close_names[0]}?"
            if close_names
            else f"its tasks are {', '.join(sorted(DATASETS))}"
        )
        raise UsageError(f"reasoning-gym has no task {name!r}; {suggestion}")
    try:
        maker = create_dataset(name, size=int(size), seed=int(seed))
        return maker, [maker[index] for index in range(int(size))]
    except Exception as error:  # a third party's program
        raise UsageError(
            f"task {GYM_PREFIX}{name} cannot be made by reasoning-gym's defaults ({type(error).__name__}: {error}); "
            "choose another task"
        ) from error


TERM_VALUES = range(10, 100)
MAX_TERMS = 99


@dataclass(frozen=True)
class TermRange:
    """Fewest and most terms of a problem, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Problem:
    """A question, the worked answer a model learns to write, and the value that answer ends in."""

    question: str
    solution: str
    answer: str


@dataclass(frozen=True)
class Task:
    """How a task writes a problem from its terms, and how it reads the final answer out of a response."""

    name: str
    splits: dict[str, TermRange]
    write: Callable[[list[int]], Problem]
    read_answer: Callable[[str], str]


@dataclass(frozen=True)
class ProblemSet:
    """A task with its number of terms and its seed fixed; problem `i` depends on nothing but these and `i`."""

    task: Task
    terms: TermRange
    seed: int

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"{self.task.name}/{self.terms.low}-{self.terms.high}/{self.seed}/{index}")
        return self.task.write(rng.choices(TERM_VALUES, k=rng.randint(self.terms.low, self.terms.high)))


def verify(task: str, answer: str, response: str) -> bool:
    """Whether a response ends in the right answer; `task` is a built-in task's name, a key of `TASKS`.

    `response` is the text before the end of the turn, without special tokens. A truncated response has no final
    answer: the caller scores it as wrong whatever it ends in.
    """
    return TASKS[task].read_answer(response) == answer


def _write_sum(terms: list[int]) -> Problem:
    totals = list(accumulate(terms))
    sums = [
        f"{total_before}+{term}={total}"
        for total_before, term, total in zip(totals[:-1], terms[1:], totals[1:], strict=True)
    ]
    return Problem(f"sum {_with_numbers(terms, ' ')}", _with_numbers([terms[0], *sums], ";"), str(totals[-1]))


def _write_copy(terms: list[int]) -> Problem:
    copy = _with_numbers(terms, ";")
    return Problem(f"copy {_with_numbers(terms, ' ')}", copy, copy)


def _with_numbers(items: Sequence[int | str], separator: str) -> str:
    """`1:12 2:73`: with its number before it, each term is found in one place however many there are."""
    return separator.join(f"{number}:{item}" for number, item in enumerate(items, start=1))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sums",
            {"easy": TermRange(2, 3), "medium": TermRange(4, 6), "hard": TermRange(8, 8), "long": TermRange(48, 75)},
            _write_sum,
            lambda response: response.rpartition("=")[2].strip(),
        ),
        Task(
            "copy",
            {"easy": TermRange(4, 4), "medium": TermRange(8, 8), "hard": TermRange(24, 24), "long": TermRange(99, 99)},
            _write_copy,
            str.strip,
        ),
    )
}
