"""The process ends with its code, whatever its streams do at that moment."""

import subprocess
import sys

import pytest

REFUSING = """
import sys
from mismatch_probe.cli.process import end_at_once

class Refusing:
    def flush(self):
        raise {error}

sys.stdout = Refusing()
end_at_once(130)
"""


@pytest.mark.parametrize("error", ["RuntimeError('reentrant call')", "OSError(28, 'full')"])
def test_a_stream_that_cannot_be_flushed_changes_no_exit_code(error: str) -> None:
    """A second Ctrl-C within a write makes the flush a reentrant call."""
    assert code_where_a_flush_raises(error) == 130


def test_what_no_stream_raises_is_not_swallowed() -> None:
    assert code_where_a_flush_raises("KeyError") != 130


def code_where_a_flush_raises(error: str) -> int:
    words = [sys.executable, "-c", REFUSING.format(error=error)]
    return subprocess.run(words, capture_output=True, check=False).returncode
