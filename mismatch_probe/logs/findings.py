"""What is told about a log before any number is computed from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """What a finding does to the numbers."""

    BROKEN = "broken"
    """None may be computed before the log is mended."""
    MISSING = "missing"
    """The values it names were not recorded and are left out."""
    WARNING = "warning"
    """They are computed, and may mean something else than they seem to."""
    NOTE = "note"
    """They are not touched."""


@dataclass(frozen=True, kw_only=True)
class LogFinding:
    """One thing that is told about a log. column: the field of `LoggedResponse` that it is about; None: the rows."""

    code: str
    sentence: str
    level: Level
    column: str | None = None
    evidence: Mapping[str, object] = field(default_factory=dict)


Tell = Callable[[LogFinding], None]
"""Who hears what a reader left out, and why."""
