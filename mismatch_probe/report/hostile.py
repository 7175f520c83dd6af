"""Text written by a model or a stranger, as HTML and JSON that a page may hold; what a terminal may show is `inert`."""

import json
from typing import Any, Final

from markupsafe import Markup, escape

from mismatch_probe.inert import SHORT_NAMES, is_unseen, shortened, tamed

_MOST_CHARACTERS: Final = 4000


def visible(text: str) -> Markup:
    """`text` as HTML: escaped, what cannot be seen shown as a small named box (`<i>`), and what is endless cut."""
    pieces: list[str] = []
    for character in tamed(shortened(text, _MOST_CHARACTERS, keep="start")):
        if is_unseen(character):
            pieces.append(f"<i>{SHORT_NAMES.get(character, f'U+{ord(character):04X}')}</i>")
        else:
            pieces.append(str(escape(character)))
    return Markup("".join(pieces))


def inert_json(document: Any) -> Markup:
    """A JSON document that may stand inside `<script type="application/json">`: pure ASCII without `<`, `>` or `&`."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
