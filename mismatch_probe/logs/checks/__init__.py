"""What must be known of a log before any number is computed from it."""

from mismatch_probe.logs.checks.columns import is_copied
from mismatch_probe.logs.checks.log import LogChecks, MissingNumbers

__all__ = ["LogChecks", "MissingNumbers", "is_copied"]
