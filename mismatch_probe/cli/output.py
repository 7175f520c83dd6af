"""Machine-readable output: one JSON document on stdout, everything for people on stderr."""

import os
import sys

from pydantic import BaseModel
from rich.console import Console

from mismatch_probe.errors import StorageError


def people() -> Console:
    """Where people read. Brackets in a path, a name or an error are text and no markup."""
    return Console(stderr=True, markup=False)


def print_json(document: BaseModel) -> None:
    """
    Raises:
        StorageError: whoever reads stdout stopped reading.
    """
    try:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StorageError("the JSON document was not read to its end: standard output was closed") from error
