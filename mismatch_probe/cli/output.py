"""Machine-readable output: one JSON document on stdout, everything for people on stderr."""

import sys

from pydantic import BaseModel


def print_json(document: BaseModel) -> None:
    sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    sys.stdout.flush()
