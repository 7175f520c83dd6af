"""Text that a terminal may show, and command lines that a shell may run."""

import re
import shlex
import unicodedata
from typing import Final

SHORT_NAMES: Final = {
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
_UNSEEN_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_UNSEEN_LETTERS_AND_MARKS: Final = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]")
"""Default-ignorable code points whose category does not tell: joiners, fillers, variation selectors."""
_MAX_COMBINING_MARKS: Final = 2
_UNBROKEN: Final = re.compile(
    r"(?:`[^`]*`|(?<![^ ])\d[\d.,e-]*(?<=\d) (?=[a-z])|[^ ]| (?=%)|(?<=\w) (?=\d[\d.,]*[.,;:)](?: |$)))+"
)
"""No line ends between a number and its unit or what it counts, nor between a word and a number that ends a clause: a
line that begins with `1. ` reads like an item of a list. Lists of numbers, or of names that end in one, are broken.
"""
_COMMAND: Final = re.compile(r"::+(?=[A-Za-z])|##+(?=\w*\[)")
"""What starts a command to the runner of a CI log: `::error::` at the start of a line, `##[error]` anywhere in it."""


def plain(text: str) -> str:
    """`text` on one line for a terminal, a log or a title: what cannot be seen is spelt out, `<U+202E>` for instance.

    Terminal escape sequences, bidirectional overrides, line breaks and the commands of CI runners lose their power
    here; what has been through it once stays as it is.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(_spelt(character) if is_unseen(character) else character for character in with_few_marks(text))
    return _COMMAND.sub(lambda command: " ".join(command[0]), text)


def cut_text(text: str, limit: int, *, keep: str) -> str:
    """At most `limit` characters of `text`, from its `start` or its `end`, with an ellipsis where it was cut."""
    if len(text) <= limit:
        return text
    return f"…{text[-limit:]}" if keep == "end" else f"{text[:limit]}…"


def lines_of_width(text: str, width: int) -> list[str]:
    """`text` on lines of at most `width` columns, broken at blanks alone. What has none, a path, a flag or a command
    between backticks, is whole on a line, which is then longer where it must be: a terminal breaks it, and its copy is
    as it was.
    """
    if columns_of(text) <= width:
        return [text]
    lines: list[str] = []
    for unit in _UNBROKEN.findall(text):
        if lines and columns_of(lines[-1]) + 1 + columns_of(unit) <= width:
            lines[-1] += f" {unit}"
        else:
            lines.append(unit)
    return lines


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes, whose characters all show."""
    if text.isascii():
        return len(text)
    columns = (
        2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text if not unicodedata.combining(each)
    )
    return sum(columns)


def with_few_marks(text: str) -> str:
    """`text` without the third and later combining marks in a row, which would paint over the neighbouring lines."""
    characters: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) or unicodedata.category(character) == "Me" else 0
        if marks <= _MAX_COMBINING_MARKS:
            characters.append(character)
    return "".join(characters)


def is_unseen(character: str) -> bool:
    """Whether a character is a control, a format or an invisible one."""
    return (
        unicodedata.category(character) in _UNSEEN_CATEGORIES
        or "\U000e0100" <= character <= "\U000e01ef"
        or _UNSEEN_LETTERS_AND_MARKS.match(character) is not None
    )


def _spelt(character: str) -> str:
    return SHORT_NAMES[character] if character in "\n\t\r" else f"<U+{ord(character):04X}>"


def command_line(*words: object) -> str:
    """`mismatch-probe` and the words, those quoted that a shell would take apart."""
    return words_line("mismatch-probe", *words)


def words_line(*words: object) -> str:
    """The words, those quoted that a shell would take apart."""
    return shlex.join(map(str, words))
