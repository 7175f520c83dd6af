"""What is found in a log before any number is computed from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """What a finding does to the numbers."""

    BROKEN = "broken"
    """None may be computed before the log is fixed."""
    MISSING = "missing"
    """The values it names were not recorded and are left out."""
    WARNING = "warning"
    """They are computed, and may mean something else than they seem to."""
    NOTE = "note"
    """They are not touched."""


class LogCode(StrEnum):
    """What can be found in a log (`docs/logs.md`)."""

    NO_NUMBERS = "no_numbers"
    ALL_ZERO = "all_zero"
    CONSTANT = "constant"
    COPIED = "copied"
    COPIED_ROWS = "copied_rows"
    SOME_MISSING = "some_missing"
    SENTINELS = "sentinels"
    ZEROS_FILL_RESPONSES = "zeros_fill_responses"
    ZEROS_FOR_MISSING = "zeros_for_missing"
    ZEROS_UNTOLD = "zeros_untold"
    WRONG_SIGN = "wrong_sign"
    SHIFTED = "shifted"
    UNRELATED = "unrelated"
    OTHER_BASE = "other_base"
    BEYOND_VOCABULARY = "beyond_vocabulary"
    MASK_COUNTS = "mask_counts"
    NO_SAMPLED_TOKENS = "no_sampled_tokens"
    PADDING_AS_TOKENS = "padding_as_tokens"
    DUPLICATES = "duplicates"
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    HALF_WRITTEN = "half_written"
    UNREADABLE_FILES = "unreadable_files"
    UNFINISHED_STEP = "unfinished_step"
    PADDING_ROWS = "padding_rows"
    EVALUATION_LEFT_OUT = "evaluation_left_out"
    NO_WEIGHT_VERSIONS = "no_weight_versions"
    UNREAD_COLUMNS = "unread_columns"


@dataclass(frozen=True, kw_only=True)
class LogFinding:
    """One thing that is found in a log."""

    code: LogCode
    sentence: str
    level: Level
    column: str | None = None
    """The field of `LoggedResponse` that it is about; None where it is about the rows."""
    evidence: Mapping[str, object] = field(default_factory=dict)


Tell = Callable[[LogFinding], None]
"""Called with what a reader left out, and why."""
