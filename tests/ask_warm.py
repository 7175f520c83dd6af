"""`python -S -E tests/ask_warm.py SOCKET WORDS`: has the warm program run the words, and ends as they end."""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mismatch_probe.children.messages import read_number, send


def ask(meeting: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(meeting)
        send(control, {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}, (0, 1, 2))
        code = read_number(control.fileno())
    assert code is not None, "nothing was forked"
    return code


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
