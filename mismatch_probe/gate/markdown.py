"""The result as Markdown, for a job summary or a comment: numbers and names, and what a stranger wrote is inert."""

import re

from mismatch_probe.gate.wording import no_baseline
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_many
from mismatch_probe.records.gate_result import GateResult
from mismatch_probe.report.gate import checks_table
from mismatch_probe.report.screen import Write, in_full
from mismatch_probe.report.view import Badge, Cell, Table

_MARKS = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "error": "⛔"}
_WARNED = "⚠️"


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$@&-]|:(?=//)|(?<=www)\.)", re.IGNORECASE)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no link, no mention, no markup, no table cell of its own."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def escaped_cell(cell: Cell) -> str:
    return escaped(in_full(cell))


def markdown_table(table: Table, write: Write = escaped_cell) -> list[str]:
    """A table of the page as lines of Markdown; `write` says how a cell is written."""
    rows = (table.columns, ["---"] * len(table.columns), *([write(cell) for cell in row] for row in table.rows))
    return [f"| {' | '.join(row)} |" for row in rows]


def render_markdown(result: GateResult) -> str:
    """A heading with the answer, the sentence, one row a check, and what the answer rests on."""
    lines = [f"### {_MARKS[result.answer]} mismatch-probe gate: {result.answer}", "", escaped(result.sentence), ""]
    if result.next_command is not None:
        lines += [escaped(result.next_command), ""]
    if result.checks:
        lines += [*markdown_table(checks_table(result.checks), _written), ""]
    lines += [f"- {_WARNED} {escaped(sentence)}" for sentence in no_baseline(result)]
    lines += [f"- {escaped(note)}" for note in (*_basis(result), *result.notes)]
    sources = dict.fromkeys(check.source for check in result.checks if check.source)
    lines += [f"- source of limits: {escaped(source)}" for source in sources]
    return "\n".join(lines).rstrip() + "\n"


def _written(cell: Cell) -> str:
    return _MARKS.get(cell.words, _WARNED) if isinstance(cell, Badge) else escaped_cell(cell)


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
            size = f"{write_many(look.num_sequences, 'sequence')} of {write_many(look.num_prompts, 'prompt')}"
            lines.append(f"{size}; {needed}")
        lines.append(
            f"look {look.number} of {len(look.declared)} (at {', '.join(map(str, look.declared))} sequences): "
            f"{look.spent:.3f} of alpha {result.alpha:g} spent, one-sided bounds at {look.nominal_level:.4f}"
        )
    return lines
