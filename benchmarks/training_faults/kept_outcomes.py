"""What came of a run, kept as JSON in the scratch folder, so that a later call goes on where one ended."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class NotRunError(Exception):
    """Nothing is kept of it, and there is no time left to run it."""


def kept_or_made(path: Path, make: Callable[[], dict[str, Any]], until: float = float("inf")) -> dict[str, Any]:
    """The document at `path`, made first where there is none.

    Raises:
        NotRunError: there is none, and `until` [seconds of the monotonic clock] has passed.
    """
    if not path.exists():
        if time.monotonic() > until:
            raise NotRunError(path.stem)
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made), encoding="utf-8")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
