"""The result on one screen; plain lines where the output is no terminal."""

from rich.console import Console

from mismatch_probe.gate.floor import Floor
from mismatch_probe.gate.wording import no_baseline
from mismatch_probe.notation import write_number
from mismatch_probe.records.gate_result import CheckResult, GateResult
from mismatch_probe.report.gate import checks_table
from mismatch_probe.report.screen import print_command, print_line, print_table
from mismatch_probe.report.view import Table

_BEGIN = {"fail": "broken", "inconclusive": "undecided"}
"""What the sentence of a blocking check that is not kept begins with."""
_STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "error": "bold magenta"}


def render_gate(result: GateResult, console: Console) -> None:
    """One row a check, a sentence for each that is not kept, and the answer last, where the eye stops.

    A command to go on stands in a line of its own.
    """
    if result.checks:
        print_table(console, checks_table(result.checks))
    for line in (*_sentences(result), *no_baseline(result), *result.notes):
        print_line(console, line)
    if result.answer != "error":
        print_line(console, result.sentence, _STYLES[result.answer])
    if result.next_command is not None:
        print_command(console, result.next_command)


def render_floor(floor: Floor, console: Console) -> None:
    """What calibration found."""
    rows = [
        [row.pair, row.measured, write_number(row.same_leg), "n/a" if row.change is None else f"{row.change:.2%}"]
        for row in floor.entries
    ]
    print_table(console, Table("Floor", ["pair", "measured", "same leg twice", "change between runs"], rows))


def _sentences(result: GateResult) -> list[str]:
    return [f"{_begin(check)}: {check.sentence}" for check in result.checks if check.answer != "pass"]


def _begin(check: CheckResult) -> str:
    return "warning" if check.level == "warn" else _BEGIN[check.answer]
