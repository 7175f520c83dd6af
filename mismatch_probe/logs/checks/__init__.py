"""What must be known of a log before any number is computed from it."""

from mismatch_probe.logs.checks.log import LogChecks, MissingNumbers
from mismatch_probe.logs.checks.rows import is_copied

__all__ = ["LogChecks", "MissingNumbers", "is_copied"]
