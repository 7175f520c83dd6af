"""A program for a shell's PATH that is `python -m mismatch_probe`, forked from a process that has imported everything.

It has the streams, the folder, the environment and the exit code that it would have as an interpreter of its own.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from mismatch_probe.children.messages import Send, receive, send_number
from mismatch_probe.children.start import Job, process_of
from tests.warm_python import become

_ASKS: Final = Path(__file__).with_name("ask_warm.py")


@contextmanager
def warm_program() -> Iterator[str]:
    """A line of shell that runs it with the words behind it, while the body runs."""
    with TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "asked")
        with process_of(Job("the warm program", serve, (meeting,), "engine", "")) as job:
            assert job.hear(lambda message: None), "it does not listen"
            yield f"{sys.executable} -S -E {_ASKS} {meeting}"


def serve(send: Send, meeting: str) -> None:
    """Fork for each request and give its exit code, one after the other."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(meeting)
        listening.listen()
        send("listens")
        while True:
            control, _ = listening.accept()
            with control:
                received = receive(control)
                assert received is not None
                request, streams = received
                pid = os.fork()
                if pid == 0:
                    os.environ.clear()
                    os.chdir(request["folder"])
                    become(["mismatch_probe", *request["words"]], request["environment"], streams)
                for stream in streams:
                    os.close(stream)
                send_number(control.fileno(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
