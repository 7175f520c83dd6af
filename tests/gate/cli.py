"""The command line in this process, for tests of many small calls."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.__main__ import run


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document


class CommandLine:
    """Runs `mismatch-probe WORDS` and catches what it says and how it ends."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *words: object) -> Ended:
        given = [str(word) for word in words]
        self._monkeypatch.setattr(sys, "argv", ["mismatch-probe", *given])
        self._capsys.readouterr()
        code = run(given)
        output = self._capsys.readouterr()
        return Ended(code, output.out, " ".join(output.err.split()))


def gate_file(folder: Path, text: str) -> Path:
    path = folder / "mismatch.toml"
    path.write_text(text)
    return path


def check(**values: object) -> str:
    """A `[[gate.check]]` table; strings are quoted, a slice is written as an inline table."""
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(["", "[[gate.check]]", *lines, ""])


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(below)}" for key, below in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)


GATE = "[gate]\nmin_sequences = 32\nmin_prompts = 32\nmax_sequences = 32\n"
GOOD = check(metric="abs_logprob_diff", max=1)
REGRESSION = check(metric="abs_logprob_diff", max_regression=0.5)
