"""What libraries print goes to a log file; what people and programs read stays clean."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from mismatch_probe.cli.output import PeopleConsole
from mismatch_probe.cli.streams import for_people
from mismatch_probe.records.atomic import storage_errors
from mismatch_probe.records.regular_files import open_to_append


@contextmanager
def noise_in(log: Path) -> Iterator[Console]:
    """Send everything written to this process's stdout and stderr, C++ libraries included, to the end of `log`.

    Yields a console on the stderr there was before.

    Raises:
        StorageError: the log cannot be written.
    """
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(log) as file:
            target = os.dup(file.fileno())
    saved = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        _redirect(dict.fromkeys(saved, target))
        with for_people(os.dup(saved[2])) as people:
            yield PeopleConsole(people)
    finally:
        _redirect(saved)
        for descriptor in (target, *saved.values()):
            os.close(descriptor)


def _redirect(targets: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for stream, target in targets.items():
        os.dup2(target, stream)
