"""What a job tells its parent: one JSON object a line, on a pipe of its own."""

import json
import traceback
from collections.abc import Callable
from typing import IO, Any, Final

from mismatch_probe import errors

Send = Callable[[Any], None]
"""Tell the parent something that is JSON."""

MESSAGE: Final = "message"
RESULT: Final = "result"
FAILURE: Final = "failure"


def write(stream: IO[str], kind: str, content: Any) -> None:
    stream.write(json.dumps({kind: content}) + "\n")
    stream.flush()


def read(line: str) -> tuple[str, Any]:
    """The kind and the content of a line."""
    [(kind, content)] = json.loads(line).items()
    return kind, content


def described(error: Exception, name: str) -> dict[str, str]:
    """An error of the job `name` as plain values: its own sentence, or that it was not expected.

    One of a kind that a room keeps to itself is told as what it is a kind of.
    """
    kind, message = type(error), str(error)
    if isinstance(error, errors.MismatchProbeError):
        kind = next(known for known in kind.__mro__ if getattr(errors, known.__name__, None) is known)
    else:
        what = f"{kind.__name__}: {error}".splitlines()[0]
        kind, message = errors.EngineError, f"{name} failed unexpectedly: {what}"
    where = "".join(traceback.format_exception(error))
    return {"error": kind.__name__, "message": message, "where": f"In the process of {name}:\n{where}"}


def as_exception(description: dict[str, str]) -> errors.MismatchProbeError:
    """The error that `described` was given; its traceback there is a note, which a traceback here shows."""
    kind: type[errors.MismatchProbeError] = getattr(errors, description["error"], errors.EngineError)
    error = kind(description["message"])
    error.add_note(description["where"])
    return error
