"""The result on one screen; plain lines where the output is no terminal."""

from rich.console import Console

from mismatch_probe.gate.floor import Floor
from mismatch_probe.gate.markdown import COLUMNS, check_cells
from mismatch_probe.gate.result import CheckResult, GateResult
from mismatch_probe.notation import write_number
from mismatch_probe.report.screen import print_line, print_table
from mismatch_probe.report.view import Badge, Cell, Table

_STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "error": "bold magenta"}
_KINDS = {"pass": "clean", "fail": "bug", "inconclusive": "undecided", "error": "broken"}


def render_gate(result: GateResult, console: Console) -> None:
    """One row a check, a sentence for each that is not kept, and the answer last, where the eye stops."""
    if result.checks:
        rows: list[list[Cell]] = [
            [Badge(_KINDS[check.answer], _answer(check)), *check_cells(check)] for check in result.checks
        ]
        print_table(console, Table("Checks", ["answer", *COLUMNS], rows))
    for line in (*_sentences(result), *result.notes):
        print_line(console, line)
    if result.answer != "error":
        print_line(console, result.sentence, _STYLES[result.answer])


def render_floor(floor: Floor, console: Console) -> None:
    """What calibration found."""
    rows = [
        [
            entry.pair,
            entry.measured,
            write_number(entry.same_leg),
            "n/a" if entry.change is None else f"{entry.change:.2%}",
        ]
        for entry in floor.entries
    ]
    print_table(console, Table("Floor", ["pair", "measured", "same leg twice", "change between runs"], rows))


def _answer(check: CheckResult) -> str:
    return f"warn ({check.answer})" if check.level == "warn" and check.answer != "pass" else check.answer


def _sentences(result: GateResult) -> list[str]:
    return [f"{check.level}: {check.sentence}" for check in result.checks if check.answer != "pass"]
