"""A prompt as its source gives it, and the column conventions of prompt data."""

from dataclasses import dataclass, field
from typing import Any

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import prompt_label

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Exactly one of `text`, `messages` and `token_ids` is set.

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
    where: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        given = [form for form in (self.text, self.messages, self.token_ids) if form is not None]
        if len(given) != 1:
            raise ValueError(f"prompt {self.prompt_id}: exactly one of text, messages and token_ids must be given")

    @property
    def label(self) -> str:
        """How a sentence names it."""
        return prompt_label(self.prompt_id, self.where)


_LARGEST_ID = 2**31
PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True)
class PromptRow:
    """A row's columns and where it stands (`line 3 of FILE`)."""

    where: str
    columns: dict[str, Any]


def to_prompt(prompt_id: str, row: PromptRow) -> Prompt:
    """Read a row that has exactly one of `prompt` (text or messages), `messages` and `prompt_token_ids`.

    The answer is `answer`, or verl's `reward_model.ground_truth`. A conversation's last assistant turn is no prompt
    and is left off.

    Raises:
        UsageError: no such column or several, or one that holds something else.
    """
    given = [name for name in PROMPT_COLUMNS if row.columns.get(name) is not None]
    if len(given) != 1:
        reason = f"has both {' and '.join(given)}" if given else f"has no prompt (its columns: {_names(row)})"
        raise UsageError(f"{row.where} {reason}; give each row exactly one of {', '.join(PROMPT_COLUMNS)}")
    value, answer = row.columns[given[0]], _answer(row)
    if given[0] == "prompt_token_ids":
        return Prompt(prompt_id, token_ids=_token_ids(row, value), answer=answer, where=row.where)
    if given[0] == "prompt" and isinstance(value, str):
        return Prompt(prompt_id, text=value, answer=answer, where=row.where)
    return Prompt(prompt_id, messages=_messages(row, given[0], value), answer=answer, where=row.where)


def _names(row: PromptRow) -> str:
    return ", ".join(row.columns) or "none"


def _answer(row: PromptRow) -> str | None:
    reward_model = row.columns.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    answer = row.columns.get("answer", ground_truth)
    return None if answer is None else str(answer)


def _token_ids(row: PromptRow, value: Any) -> list[int]:
    if isinstance(value, list) and all(type(token_id) is int and 0 <= token_id < _LARGEST_ID for token_id in value):
        return value
    raise UsageError(f"{row.where}: prompt_token_ids is no list of token ids; give whole numbers of the vocabulary")


def _messages(row: PromptRow, column: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not all(
        isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value
    ):
        forms = "messages" if column == "messages" else "text or messages"
        raise UsageError(f"{row.where}: {column} is no {forms}; a message is an object with role and content")
    turns = value[:-1] if value and value[-1]["role"] == "assistant" else value
    if not turns:
        raise UsageError(f"{row.where}: {column} has no turn to answer; give at least one user message")
    return [{key: part for key, part in turn.items() if part is not None} for turn in turns]
