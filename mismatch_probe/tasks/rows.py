"""The column conventions of prompt data: TRL's `prompt` and `messages`, verl's `reward_model`, recorded ids."""

from dataclasses import dataclass
from typing import Any

from mismatch_probe.errors import UsageError
from mismatch_probe.tasks.prompt import Message, Prompt

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
