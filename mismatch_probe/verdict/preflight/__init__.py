"""The lint of both sides' effective settings, read before any number is believed."""

from collections.abc import Callable, Iterable, Iterator

from mismatch_probe.errors import note_in_error
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import Sides
from mismatch_probe.verdict.preflight.rules import (
    IMAGES,
    compressed_cache,
    forward_pass,
    inexact_fp32,
    mixture,
    model_root,
    noise,
    prompt_starts,
    reference,
)
from mismatch_probe.verdict.preflight.table import (
    ASKED,
    FORMATS,
    FORWARD,
    SAMPLING,
    SERVER_IDENTITY,
    SERVER_PREFILL,
    SERVER_SAMPLING,
)
from mismatch_probe.verdict.preflight.weights import adapters, checkpoints, quantized_sources, quantized_weights

RULES: tuple[Callable[[Sides], Iterator[SettingFinding]], ...] = (
    *ASKED,
    *SAMPLING,
    checkpoints,
    forward_pass,
    adapters,
    *FORWARD,
    *IMAGES,
    quantized_weights,
    quantized_sources,
    compressed_cache,
    *FORMATS,
    inexact_fp32,
    reference,
    prompt_starts,
    *SERVER_SAMPLING,
    model_root,
    *SERVER_IDENTITY,
    mixture,
    noise,
    SERVER_PREFILL,
)
"""Rows of the table, and functions where several settings are read at a time; findings of a level keep this order."""


def preflight(sides: Sides) -> list[SettingFinding]:
    """What the settings of one pair make of it, most serious first."""
    return most_serious_findings_first(finding for rule in RULES for finding in _found_by(rule, sides))


def _found_by(rule: Callable[[Sides], Iterator[SettingFinding]], sides: Sides) -> list[SettingFinding]:
    with note_in_error(f"the rule {rule.__name__}"):
        return list(rule(sides))


def preflight_of_run(pairs: Iterable[Sides]) -> list[SettingFinding]:
    """The findings of every pair, each once, most serious first."""
    return most_serious_findings_first(dict.fromkeys(finding for sides in pairs for finding in preflight(sides)))


def most_serious_findings_first(findings: Iterable[SettingFinding]) -> list[SettingFinding]:
    """Findings of one level in their own order."""
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))
