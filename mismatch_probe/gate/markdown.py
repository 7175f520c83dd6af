"""The result as Markdown, for a job summary or a comment: numbers and names, never a token."""

import re

from mismatch_probe.gate.result import CheckResult, GateResult
from mismatch_probe.gate.wording import change_text, rounded_out
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_number

MARKS = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "error": "⛔"}
COLUMNS = ("pair", "limit", "value", "bounds", "would pass at")
_WARNED = "⚠️"
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$@&-]|:(?=//)|(?<=www)\.)", re.IGNORECASE)


def render_markdown(result: GateResult) -> str:
    """A heading with the answer, the sentence, one row a check, and what the answer rests on."""
    lines = [f"### {MARKS[result.answer]} mismatch-probe gate: {result.answer}", "", escaped(result.sentence), ""]
    if result.checks:
        lines += [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [_row(check) for check in result.checks]
        lines += [""]
    lines += [f"- {escaped(note)}" for note in (*_basis(result), *result.notes)]
    sources = dict.fromkeys(check.source for check in result.checks if check.source)
    lines += [f"- source of limits: {escaped(source)}" for source in sources]
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no link, no mention, no markup, no table cell of its own."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def mark(check: CheckResult) -> str:
    return _WARNED if check.level == "warn" and check.answer != "pass" else MARKS[check.answer]


def check_cells(check: CheckResult) -> list[str]:
    """A check under `COLUMNS`."""
    return [check.pair, limit_text(check), _value_text(check), _bounds_text(check), passing_text(check)]


def _value_text(check: CheckResult) -> str:
    """The metric; with a baseline also how much worse it is."""
    if check.baseline_value is None:
        return write_number(check.value)
    return f"{write_number(check.run_value)} ({change_text(check.value)}, {check.comparison})"


def limit_text(check: CheckResult) -> str:
    return f"{check.measured} {check.kind} {check.limit:g}"


def _bounds_text(check: CheckResult) -> str:
    if check.low is None or check.high is None:
        return "none"
    if check.kind == "max_regression":
        return f"{check.low:+.1%} to {check.high:+.1%}"
    return f"{write_number(check.low)} to {write_number(check.high)}"


def passing_text(check: CheckResult) -> str:
    """The tightest limit that would pass, rounded so that it does."""
    if check.passing_limit is None:
        return ""
    if check.kind == "max_regression" and check.passing_limit <= 0:
        return "any"
    return write_number(rounded_out(check.passing_limit, up=check.kind != "min"))


def _row(check: CheckResult) -> str:
    return "| " + " | ".join([mark(check), *map(escaped, check_cells(check))]) + " |"


def _basis(result: GateResult) -> list[str]:
    lines = [f"run {result.run}, gate file {result.gate_file}"]
    if result.model is not None:
        lines.append(f"model {result.model}, fingerprint {result.model_fingerprint}")
    if result.baseline is not None:
        lines.append(f"baseline {result.baseline}")
    look = result.look
    if look is not None and result.alpha is not None:
        if look.num_prompts is not None:
            needed = f"a pass needs {look.min_prompts} prompts"
            lines.append(f"{look.num_sequences} sequences of {look.num_prompts} prompts; {needed}")
        lines.append(
            f"look {look.number} of {len(look.declared)} (at {', '.join(map(str, look.declared))} sequences): "
            f"{look.spent:.3f} of alpha {result.alpha:g} spent, one-sided bounds at {look.nominal_level:.4f}"
        )
    return lines
