"""Text written by a model or a stranger: made visible and inert before it reaches a page or a terminal."""

import json
import unicodedata
from typing import Any

from markupsafe import Markup, escape

_SHORT_NAMES = {
    "\n": "↵",
    "\t": "⇥",
    "\r": "␍",
    "\u200b": "ZWSP",
    "\u200c": "ZWNJ",
    "\u200d": "ZWJ",
    "\u200e": "LRM",
    "\u200f": "RLM",
    "\u202a": "LRE",
    "\u202b": "RLE",
    "\u202c": "PDF",
    "\u202d": "LRO",
    "\u202e": "RLO",
    "\u2066": "LRI",
    "\u2067": "RLI",
    "\u2068": "FSI",
    "\u2069": "PDI",
    "\ufeff": "BOM",
}
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_MAX_COMBINING_MARKS = 2
_MOST_CHARACTERS = 4000


def plain(text: str) -> str:
    """`text` on one line for a terminal or a title: what cannot be seen is spelt out, `<U+202E>` for instance.

    Terminal escape sequences, bidirectional overrides and line breaks lose their power here.
    """
    return "".join(_spelt(character) if _is_unseen(character) else character for character in _tamed(text))


def visible(text: str) -> Markup:
    """`text` as HTML: escaped, what cannot be seen shown as a small named box (`<i>`), and what is endless cut."""
    pieces: list[str] = []
    for character in _tamed(shortened(text, _MOST_CHARACTERS, keep="start")):
        if _is_unseen(character):
            pieces.append(f"<i>{_SHORT_NAMES.get(character, f'U+{ord(character):04X}')}</i>")
        else:
            pieces.append(str(escape(character)))
    return Markup("".join(pieces))


def shortened(text: str, limit: int, *, keep: str) -> str:
    """At most `limit` characters of `text`, from its `start` or its `end`, with an ellipsis where it was cut."""
    if len(text) <= limit:
        return text
    return f"…{text[-limit:]}" if keep == "end" else f"{text[:limit]}…"


def inert_json(document: Any) -> Markup:
    """A JSON document that may stand inside `<script type="application/json">`: pure ASCII without `<`, `>` or `&`."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _tamed(text: str) -> str:
    """`text` without the third and later combining marks in a row, which would paint over the neighbouring lines."""
    kept: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) else 0
        if marks <= _MAX_COMBINING_MARKS:
            kept.append(character)
    return "".join(kept)


def _is_unseen(character: str) -> bool:
    return unicodedata.category(character) in _UNSEEN_CATEGORIES


def _spelt(character: str) -> str:
    return _SHORT_NAMES[character] if character in "\n\t\r" else f"<U+{ord(character):04X}>"
