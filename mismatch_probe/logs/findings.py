"""What is found in a log before any number is computed from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mismatch_probe.causes.findings import Level, LogCode

__all__ = ["Level", "LogCode", "LogFinding", "Tell"]


@dataclass(frozen=True, kw_only=True)
class LogFinding:
    """One thing that is found in a log."""

    code: LogCode
    sentence: str
    level: Level
    column: str | None = None
    """The field of `LoggedResponse` that it is about; None where it is about the rows."""
    evidence: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        code: LogCode,
        variant: str = "",
        /,
        *,
        column: str | None = None,
        level: Level | None = None,
        evidence: Mapping[str, object] | None = None,
        **figures: object,
    ) -> "LogFinding":
        """A finding in the catalogue's words; `figures` are what these name in braces."""
        return cls(
            code=code,
            sentence=code.sentence(variant, **figures),
            level=level or code.level,
            column=column,
            evidence=evidence or {},
        )


Tell = Callable[[LogFinding], None]
"""Called with what a reader left out, and why."""
