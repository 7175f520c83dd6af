"""What the checkpoint's chat template puts around a prompt: a system prompt's text, and the headers of turns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mismatch_probe.errors import UsageError
from mismatch_probe.tasks.encoding import rendered
from mismatch_probe.tasks.rows import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT: Final = "mismatch probe content"
_SYSTEM: Final = "You are a helpful assistant."
_MOST_PIECES: Final = 2
_MEND: Final = "mend the tokenizer's chat_template"


@dataclass(frozen=True)
class Template:
    """Token ids before and behind a user's message."""

    before: tuple[int, ...]
    behind: tuple[int, ...]


def templates(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[Template], list[str]]:
    """Without a system prompt of ours, and with the usual one; and why one of them is left out, as many refuse one."""
    if tokenizer.chat_template is None:
        return [], []
    asked: list[Message] = [{"role": "user", "content": _CONTENT}]
    usable, refused = [], []
    for messages in (asked, [{"role": "system", "content": _SYSTEM}, *asked]):
        try:
            with rendered(tokenizer, [("a user's message", messages)], _MEND) as texts:
                before, content, behind = next(texts).partition(_CONTENT)
        except UsageError as error:
            refused.append(str(error))
        else:
            if content:
                usable.append(Template(_ids(tokenizer, before), _ids(tokenizer, behind)))
    return usable, refused


def headers_of(templates: list[Template], special: frozenset[int]) -> list[tuple[int, ...]]:
    """What templates put before a message, whole and up to each special token: a system prompt alone is among them."""
    headers: dict[tuple[int, ...], None] = {}
    for template in templates:
        ends = [place for place in range(1, len(template.before)) if template.before[place] in special]
        headers |= dict.fromkeys(template.before[:end] for end in (*ends[-_MOST_PIECES:], len(template.before)))
    return [header for header in headers if header]


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()
