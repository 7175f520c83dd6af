"""Machine-readable output: one JSON document on stdout, everything for people on stderr."""

import sys

from pydantic import BaseModel
from rich.console import Console


def people() -> Console:
    """Where people read. Brackets in a path, a name or an error are text and no markup."""
    return Console(stderr=True, markup=False)


def print_json(document: BaseModel) -> None:
    sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    sys.stdout.flush()
