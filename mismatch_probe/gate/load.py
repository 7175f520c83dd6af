"""Reading the gate file: every mistake in it is one sentence that says where."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mismatch_probe.config.load import parse_settings, read_settings_file
from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.gate.config import Check, FiledCheck, GateFile, GateSettings, PresetName
from mismatch_probe.gate.metric_names import AGGREGATES, FILED_METRICS, full_name, known_metrics
from mismatch_probe.reading import is_there

_CLIP_NATS = 5.0

_NEMO = "NeMo-RL, guide to adding models: token_mult_prob_error at most 1.05, gen_kl_error below 1e-3"
_PRIME = "prime-rl, integration tests: mismatch_kl (k3) below 0.015 in each of 20 steps"
_VERL = "verl, rollout_probs_diff_mean: below 0.005 normal, above 0.01 a problem"
_VERL_ALERT = "verl, rollout correction: alerts at ESS below 0.3, abs(kl) above 0.1, chi2_token above 1"
_TINKER = "tinker cookbook: sampling against training KL (k1) below 0.01"
_TITAN = "torchtitan, batch-invariant mode: log-probs bitwise equal"

PRESETS: dict[PresetName, tuple[Check, ...]] = {
    "nemo-rl": (
        Check(metric="token_mult_prob_error", clip=_CLIP_NATS, max=1.05, source=_NEMO),
        Check(metric="kl_k3", clip=_CLIP_NATS, max=1e-3, source=_NEMO),
    ),
    "prime-rl": (Check(metric="kl_k3", clip=_CLIP_NATS, max=0.015, source=_PRIME),),
    "verl": (
        Check(metric="prob_abs_diff", max=0.01, source=_VERL),
        Check(metric="prob_abs_diff", max=0.005, level="warn", source=_VERL),
        Check(metric="ess_token", clip=_CLIP_NATS, min=0.3, level="warn", source=_VERL_ALERT),
        Check(metric="kl_k1", max=0.1, level="warn", source=_VERL_ALERT),
        Check(metric="kl_k1", min=-0.1, level="warn", source=_VERL_ALERT),
        Check(metric="chi2_token", clip=_CLIP_NATS, max=1.0, level="warn", source=_VERL_ALERT),
    ),
    "tinker": (
        Check(metric="kl_k1", max=0.01, source=_TINKER),
        Check(metric="kl_k1", min=-0.01, source=f"{_TINKER}; a KL is not negative, so far below 0 k1 is no KL"),
    ),
    "bitwise": (Check(metric="bitwise_equal", equal=1.0, source=_TITAN),),
}


_Kind = TypeVar("_Kind", Check, FiledCheck)


def load_gate(path: Path, flag: str = "--config") -> GateFile:
    """The gate file of the contract: `[gate]`, and `[[gate.check]]` for each limit; `flag` is what named it.

    Raises:
        UsageError: the file cannot be read, a key or a metric is unknown, a limit cannot be decided, or none is given.
    """
    if not is_there(path):
        raise UsageError(
            f"{flag} {path} does not exist; `mismatch-probe init gate` writes one to edit. Two lines are enough, "
            'here for the limits of NeMo-RL: [gate] and preset = "nemo-rl"'
        )
    return parse_gate(read_settings_file(path, flag=flag), str(path))


def parse_gate(content: Mapping[str, Any], where: str) -> GateFile:
    """As `load_gate`, from the parsed file; `where` names it in messages."""
    unknown = sorted(content.keys() - {"gate"})
    if unknown:
        raise UsageError(f"{where}: table {unknown[0]!r} is unknown; a gate file has [gate] and [[gate.check]]")
    gate = content.get("gate")
    if not isinstance(gate, Mapping):
        raise UsageError(f"{where} has no [gate] table; a gate file has [gate] and [[gate.check]]")
    tables = gate.get("check", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"{where}: gate.check is no list of tables; write each check under [[gate.check]]")
    given = {key: value for key, value in gate.items() if key != "check"}
    settings = parse_settings(GateSettings, given, f"{where}, [gate]")
    own = [_check(table, f"{where}, check {number}") for number, table in enumerate(tables, start=1)]
    repeated = next((check for index, check in enumerate(own) if check in own[:index]), None)
    if repeated is not None:
        raise UsageError(f"{where}: the check {repeated} is given twice; remove one")
    active = [check for check in (*(PRESETS[settings.preset] if settings.preset else ()), *own) if check.level != "off"]
    checks, filed = tuple(_of(Check, active)), tuple(_of(FiledCheck, active))
    if not checks and not filed:
        raise UsageError(f"{where} asks for nothing, so it would pass anything; add a [[gate.check]], or preset")
    return GateFile(settings=settings, checks=checks, filed=filed)


def _of(kind: type[_Kind], checks: Sequence[Check | FiledCheck]) -> Iterator[_Kind]:
    return (check for check in checks if isinstance(check, kind))


def _check(table: Mapping[str, Any], where: str) -> Check | FiledCheck:
    _known_metric(table, where)
    return parse_settings(FiledCheck, table, where) if _is_filed(table) else parse_settings(Check, table, where)


def _is_filed(table: Mapping[str, Any]) -> bool:
    metric = table.get("metric")
    return isinstance(metric, str) and metric in FILED_METRICS


def _known_metric(table: Mapping[str, Any], where: str) -> None:
    """Before anything else about a check is judged, its metric must exist."""
    metric, aggregate = table.get("metric"), table.get("agg", "mean")
    if (
        not isinstance(metric, str)
        or metric in FILED_METRICS
        or not isinstance(aggregate, str)
        or aggregate not in AGGREGATES
    ):
        return
    if full_name(metric, aggregate) in known_metrics():
        return
    if metric in known_metrics():
        aggregates = [other for other in AGGREGATES if full_name(metric, other) in known_metrics()]
        raise UsageError(f"{where}: {metric} has no aggregate {aggregate!r}; it has {', '.join(aggregates)}")
    hint = did_you_mean(metric, known_metrics() | FILED_METRICS.keys())
    raise UsageError(f"{where}: metric {metric!r} is unknown{hint}")
