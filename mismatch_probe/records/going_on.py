"""The command that goes on with a run, for sentences about a file of it."""

from pathlib import Path
from typing import Final

from mismatch_probe.command_line import command_line
from mismatch_probe.reading import is_there
from mismatch_probe.records.kinds import MANIFEST

_DEEPEST: Final = 3
"""`RUN/parts/STAGE/FILE`"""


def go_on(path: Path) -> str:
    """What is to be typed to continue the comparison that `path`, its directory or a file in it, belongs to."""
    above = (path, *list(path.parents)[:_DEEPEST])
    run = next((folder for folder in above if is_there(folder / MANIFEST)), None)
    if run is None:
        return "make the run again"
    return f"continue the run with `{command_line('compare', '--resume', '--out', run)}`"
