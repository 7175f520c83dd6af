"""`mismatch-probe WORDS` in this process, which loads the heavy parts once and whose servers fork every job."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Final

import pytest

from mismatch_probe.__main__ import run
from mismatch_probe.errors import ExitCode
from tests.environment import environment_as_it_was

FEW: Final = Path(__file__).with_name("few.toml")
"""For `--config`, where how closely a run looks at a few of its responses is not what is tested."""


@dataclass(frozen=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str


def probe(*words: object, code: ExitCode | None = None) -> Answer:
    """What the command says and how it ends, which must be with `code` if one is given."""
    given = [str(word) for word in words]
    with (
        redirect_stdout(StringIO()) as output,
        redirect_stderr(StringIO()) as errors,
        pytest.MonkeyPatch.context() as patch,
        environment_as_it_was(),
    ):
        patch.setattr(sys, "argv", ["mismatch-probe", *given])
        ended = run(given)
    answer = Answer(ended, output.getvalue(), errors.getvalue())
    assert code is None or ended == code, answer
    return answer
