"""The command lines of the documents and of the help: found, joined over lines, and taken apart."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mismatch_probe.cli.options import EXAMPLES
from tests.docs.pages import Page, pages

NEEDS_GPU = "needs a GPU"
_SHELL = ("", "bash", "sh", "console")
_MODULE = "mismatch_probe"
_PROGRAMS = ("mismatch-probe", "make", "pip", "python", "torchrun")


@dataclass(frozen=True)
class CommandLine:
    """One line of a code block. comment: what stands behind its `#`."""

    page: str
    text: str
    comment: str = ""

    @property
    def words(self) -> list[str]:
        """Without variables that are set before it, what starts it as a module, and the folder of its program."""
        words = shlex.split(self.text)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if _MODULE in words:
            return [_PROGRAMS[0], *words[words.index(_MODULE) + 1 :]]
        return [words[0].rpartition("/")[2], *words[1:]]

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def needs_gpu(self) -> bool:
        return self.comment.startswith(NEEDS_GPU)


def command_lines() -> list[CommandLine]:
    of_help = [CommandLine(f"help of {name}", f"mismatch-probe {words}") for name, words in EXAMPLES.items()]
    return [*(line for page in pages() for line in lines_of(page)), *of_help]


def lines_of(page: Page) -> Iterator[CommandLine]:
    """Every line of a page's shell blocks; a block of output has none that begins with a program."""
    for language, body in page.blocks:
        if language not in _SHELL:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            text, _, comment = line.partition(" #")
            if _is_command(text):
                yield CommandLine(page.name, " ".join(text.split()), comment.strip())


def mentions() -> list[CommandLine]:
    """`mismatch-probe ...` in prose."""
    return [
        CommandLine(page.name, code)
        for page in pages()
        for code in page.code_in_prose
        if re.match("mismatch-probe .", code)
    ]


def _is_command(text: str) -> bool:
    words = text.split()
    names = [word.rpartition("/")[2] for word in words if not re.match(r"[A-Z_]+=", word)]
    return bool(names) and names[0] in _PROGRAMS
