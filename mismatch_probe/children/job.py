"""A job's own process: one function runs, and what it says, gives or raises goes to the parent.

`python -m mismatch_probe.children.job REQUEST DESCRIPTOR` runs it in an interpreter of its own.
"""

import faulthandler
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, Concatenate, Final, NoReturn, Self

from mismatch_probe.children.messages import FAILURE, MESSAGE, RESULT, Send, describe_error, write
from mismatch_probe.host import prepare_process

_LOG: Final = 2
"""The descriptor of standard error, which goes to the job's log."""

JobFunction = Callable[Concatenate[Send, ...], Any]
"""Called as `function(send, *arguments)` in the job's process, which imports its module: JSON in, JSON out."""


def name_of(function: JobFunction) -> str:
    """`MODULE:NAME`, by which another process finds it; the module of a program is the one that `python -m` names."""
    spec = sys.modules[function.__module__].__spec__
    return f"{function.__module__ if spec is None else spec.name}:{function.__qualname__}"


def function_of(name: str) -> JobFunction:
    """The function that `name_of` named."""
    module, _, attribute = name.partition(":")
    function: JobFunction = getattr(import_module(module), attribute)
    return function


@dataclass(frozen=True)
class JobRequest:
    """A function by its name (`name_of`), its arguments, and where it is to run."""

    name: str
    function: str
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def run_function(request: JobRequest, messages: int) -> int:
    """Call the function; 0 when it returned. A failure is sent before the traceback, which a full disk can refuse.

    Where a library ends the process by a signal, what each thread was at is in its log.
    """
    faulthandler.enable(_LOG)
    os.chdir(request.folder)
    with os.fdopen(messages, "w", encoding="utf-8") as stream:
        try:
            function = function_of(request.function)
            write(stream, RESULT, function(partial(write, stream, MESSAGE), *request.arguments))
        except Exception as error:  # noqa: BLE001 - the boundary of the process: whatever it is reaches the parent
            write(stream, FAILURE, describe_error(error, request.name))
            traceback.print_exc()
            return 1
    return 0


def run_and_exit(request: JobRequest, messages: int) -> NoReturn:
    """Run in a process that was forked from a server, and end without what the server would do at its own end."""
    code = 1
    try:
        code = run_function(request, messages)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        traceback.print_exc()
    except BaseException:  # noqa: BLE001 - it must not go on as a second server
        traceback.print_exc()
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 1
        os._exit(code)


def main(request: JobRequest, messages: int) -> NoReturn:
    """Run in an interpreter of its own. A log that takes no more text leaves the exit code what it is."""
    code = 1
    try:
        code = run_function(request, messages)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os._exit(code or 1)
    sys.exit(code)


if __name__ == "__main__":
    prepare_process()
    main(JobRequest.from_json(sys.argv[1]), int(sys.argv[2]))
