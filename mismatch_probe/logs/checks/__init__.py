"""What must be known of a log before any number is computed from it."""

from mismatch_probe.logs.checks.copies import is_copied
from mismatch_probe.logs.checks.log import LogChecks, Unrecorded

__all__ = ["LogChecks", "Unrecorded", "is_copied"]
