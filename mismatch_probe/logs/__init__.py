"""Rollout logs of other systems: recognised, read in bounded memory, and checked before any number is computed."""

from mismatch_probe.causes.findings import Level, LogCode
from mismatch_probe.logs.checks import LogChecks, MissingNumbers, is_copied
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.formats import FORMATS, recognise
from mismatch_probe.logs.look import NoLogError, Source
from mismatch_probe.logs.row import LogFinding, Tell

__all__ = [
    "FORMATS",
    "Format",
    "Holds",
    "Level",
    "LogChecks",
    "LogCode",
    "LogFinding",
    "MissingNumbers",
    "NoLogError",
    "Source",
    "Tell",
    "is_copied",
    "recognise",
]
