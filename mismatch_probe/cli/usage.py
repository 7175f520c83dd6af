"""What typer refuses, as one sentence: what was given, why it cannot be used, where the mend is listed."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import typer

PROGRAM: Final = "mismatch-probe"

TYPER_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""The base of all that typer refuses; newer versions bring their own, older ones take click's."""

_WORDS: Final = (
    (r"^Missing (argument|option|parameter) '(.*?)'\. ?", r"\2 is missing; "),
    (r"^Invalid value for '(.*?)': ", r"\1 cannot be used: "),
    (r"^Got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)$", r"\1 is more than the command takes"),
    (r"^No such (option|command):? (\S+?)\.?(?= |$)", r"there is no \1 \2"),
    (r"\(Possible options: (.*)\)$", r"(close to it: \1)"),
    (r"^Option '(.*?)' requires an argument", r"\1 needs a value behind it"),
)


def sentence_of(error: Any, words: Sequence[str]) -> str:
    """What typer says of an error of usage, without its box, and the command whose --help lists what it takes."""
    said = " ".join(error.format_message().split())
    for pattern, ours in _WORDS:
        said = re.sub(pattern, ours, said)
    said = _with_value(said.rstrip(".; "), words)
    return f"{said}; `{_command(error, words)} --help` lists what it takes"


def _with_value(said: str, words: Sequence[str]) -> str:
    """The value beside the flag where it cannot be used: newer versions of typer leave it out."""
    flag, refused, why = said.partition(" cannot be used: ")
    given = [value for name, value in pairwise(words) if name == flag]
    return f"{flag} {given[-1]}{refused}{why}" if refused and given else said


def _command(error: Any, words: Sequence[str]) -> str:
    if error.ctx is not None:
        return str(error.ctx.command_path)
    return " ".join([PROGRAM, *(word for word in words[:1] if not word.startswith("-"))])
