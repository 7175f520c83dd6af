"""A command of a test that hangs ends by itself, and its errors say where it, or a fork of it, hung."""

import signal
import timeit

import pytest

from tests import warm_python

pytestmark = pytest.mark.slow

SLEEP = "__import__('time').sleep(120)"
FORK = f"import os; os.waitpid(os.fork() or {SLEEP}, 0)"


@pytest.mark.parametrize("statement", [SLEEP, FORK], ids=["alone", "in a fork"])
def test_a_command_that_hangs_ends_and_says_where(statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_python, "LONGEST_SECONDS", 1.0)
    answer = warm_python.warm_python("timeit", "-n", 1, "-r", 1, statement, code=None, preload="training")
    assert answer.returncode == -signal.SIGALRM
    assert f'File "{timeit.__file__}"' in answer.stderr


def test_a_fork_of_a_command_runs_to_its_end() -> None:
    statement = "import os; assert os.waitpid(os.fork() or os._exit(7), 0)[1] == 7 << 8"
    answer = warm_python.warm_python("timeit", "-n", 1, "-r", 1, statement, code=None, preload="training")
    assert (answer.returncode, answer.stderr) == (0, "")
