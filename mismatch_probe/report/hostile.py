"""Text written by a model or a stranger, as HTML that a page may hold; what a terminal may show is `inert`."""

from typing import Final

from markupsafe import Markup, escape

from mismatch_probe.inert import SHORT_NAMES, is_unseen, shortened, tamed

PART_OF_CHARACTER: Final = "·"
"""What stands for a token without text: it holds the first bytes of a character that a later token completes."""
_MOST_CHARACTERS: Final = 4000


def visible_token(text: str, most_characters: int) -> Markup:
    """A token's text as `visible` shows it; `PART_OF_CHARACTER` for one without text."""
    return visible(shortened(text, most_characters, keep="start") or PART_OF_CHARACTER)


def visible(text: str) -> Markup:
    """`text` as HTML: escaped, what cannot be seen shown as a small named box (`<i>`), and what is endless cut."""
    shown = shortened(text, _MOST_CHARACTERS, keep="start")
    if shown.isascii() and shown.isprintable():
        return escape(shown)
    pieces: list[str] = []
    for character in tamed(shown):
        if is_unseen(character):
            pieces.append(f"<i>{SHORT_NAMES.get(character, f'U+{ord(character):04X}')}</i>")
        else:
            pieces.append(str(escape(character)))
    return Markup("".join(pieces))
