"""The lint of both sides' effective settings, read before any number is believed."""

from collections.abc import Callable, Iterable, Iterator

from mismatch_probe.errors import noted
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import Sides
from mismatch_probe.verdict.preflight.numerics import (
    applied_dtypes,
    attention,
    bounded_steps,
    compressed_cache,
    eager_by_default,
    experts_apart,
    following_positions,
    forward_pass,
    inexact_fp32,
    rounded_frequencies,
    rounded_outputs,
    states,
)
from mismatch_probe.verdict.preflight.sampling import defaults_picked_up, prompt_starts, supports, temperatures
from mismatch_probe.verdict.preflight.server import server
from mismatch_probe.verdict.preflight.weights import adapters, checkpoints, quantized_sources, quantized_weights

RULES: tuple[Callable[[Sides], Iterator[SettingFinding]], ...] = (
    applied_dtypes,
    temperatures,
    supports,
    defaults_picked_up,
    checkpoints,
    forward_pass,
    adapters,
    attention,
    following_positions,
    bounded_steps,
    eager_by_default,
    states,
    rounded_frequencies,
    quantized_weights,
    quantized_sources,
    compressed_cache,
    experts_apart,
    rounded_outputs,
    inexact_fp32,
    prompt_starts,
    server,
)


def preflight(sides: Sides) -> list[SettingFinding]:
    """What the settings of one pair make of it, most serious first."""
    return most_serious_findings_first(finding for rule in RULES for finding in _found_by(rule, sides))


def _found_by(rule: Callable[[Sides], Iterator[SettingFinding]], sides: Sides) -> list[SettingFinding]:
    with noted(f"the rule {rule.__name__}"):
        return list(rule(sides))


def preflight_of_run(pairs: Iterable[Sides]) -> list[SettingFinding]:
    """The findings of every pair, each once, most serious first."""
    return most_serious_findings_first(dict.fromkeys(finding for sides in pairs for finding in preflight(sides)))


def most_serious_findings_first(findings: Iterable[SettingFinding]) -> list[SettingFinding]:
    """Findings of one level in their own order."""
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))
