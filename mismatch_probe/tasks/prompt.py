"""A prompt as its source gives it, before any template or tokenizer."""

from dataclasses import dataclass, field
from typing import Any

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
