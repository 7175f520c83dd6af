"""`python -m mismatch_probe WORDS` on streams of the caller's, forked from an interpreter that imported the commands.

It begins with the streams that Python makes of the descriptors it is started with, and ends as every interpreter ends,
so all that happens to streams is to be seen. What imports do is not: they are over.
"""

import gc
import importlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children.messages import read_number, receive, send, send_number

ROOT: Final = Path(__file__).parents[1]
STANDARD: Final = {0: "stdin", 1: "stdout", 2: "stderr"}


class LightPython:
    """The interpreter that is forked; close it at the end."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._ended, ended = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.light_python", json.dumps([theirs.fileno(), ended])],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), ended),
        )
        theirs.close()
        os.close(ended)

    def run(self, words: Sequence[object], folder: Path, streams: dict[int, int]) -> int:
        """The exit code of the words in a folder; a standard stream without a descriptor in `streams` is closed."""
        request = {"words": [str(word) for word in words], "folder": str(folder), "open": list(streams)}
        send(self._control, request, list(streams.values()))
        code = read_number(self._ended)
        assert code is not None, "the interpreter that is forked has ended"
        return code

    def close(self) -> None:
        self._control.close()
        os.close(self._ended)
        assert self._process.wait() == 0


def _forked(control: socket.socket, ended: int) -> bool:
    """Fork for each request and tell its exit code; True in a fork, dressed as asked, and False at the end."""
    importlib.import_module("tests.ready_commands")
    gc.freeze()
    while (received := receive(control)) is not None:
        request, descriptors = received
        pid = os.fork()
        if pid == 0:
            control.close()
            os.close(ended)
            _dress(request, descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        send_number(ended, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return False


def _dress(request: dict[str, Any], descriptors: list[int]) -> None:
    for standard in STANDARD:
        os.close(standard)
    for standard, descriptor in zip(request["open"], descriptors, strict=True):
        os.dup2(descriptor, standard)
    for descriptor in descriptors:
        os.close(descriptor)
    for standard, name in STANDARD.items():
        stream = _stream(standard) if standard in request["open"] else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["folder"])
    sys.argv = ["mismatch_probe", *request["words"]]


def _stream(standard: int) -> io.TextIOWrapper:
    """As Python opens it: standard errors goes out line by line, and what cannot be encoded is escaped there."""
    errors = standard == 2
    return io.TextIOWrapper(
        open(standard, "rb" if standard == 0 else "wb", closefd=False),
        encoding="utf-8",
        errors="backslashreplace" if errors else "strict",
        line_buffering=errors,
    )


if __name__ == "__main__":
    descriptor, ended = json.loads(sys.argv[1])
    if _forked(socket.socket(fileno=descriptor), ended):
        from mismatch_probe.__main__ import main

        main()
