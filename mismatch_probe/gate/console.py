"""The result on one screen; plain lines where the output is no terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.gate.floor import Floor
from mismatch_probe.gate.markdown import bounds_text, limit_text, passing_text, value_text
from mismatch_probe.gate.result import CheckResult, GateResult
from mismatch_probe.notation import write_number
from mismatch_probe.report.screen import print_line, print_table, screen_table

_STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "error": "bold magenta"}
_COLUMNS = ("answer", "pair", "limit", "value", "bounds", "would pass at")


def render_gate(result: GateResult, console: Console) -> None:
    """One row a check, a sentence for each that is not kept, and the answer last, where the eye stops."""
    table = screen_table(console, *_COLUMNS)
    for check in result.checks:
        cells = (check.pair, limit_text(check), value_text(check), bounds_text(check), passing_text(check))
        table.add_row(Text(_answer(check), style=_STYLES[check.answer]), *map(Text, cells))
    if result.checks:
        print_table(console, table)
    for line in (*_sentences(result), *result.notes):
        print_line(console, line)
    if result.answer != "error":
        print_line(console, result.sentence, _STYLES[result.answer])


def render_floor(floor: Floor, console: Console) -> None:
    """What calibration found."""
    table = Table("pair", "measured", "same leg twice", "change between runs", box=None, pad_edge=False)
    for entry in floor.entries:
        change = "n/a" if entry.change is None else f"{entry.change:.2%}"
        table.add_row(entry.pair, entry.measured, write_number(entry.same_leg), change)
    console.print(table)


def _answer(check: CheckResult) -> str:
    return f"warn ({check.answer})" if check.level == "warn" and check.answer != "pass" else check.answer


def _sentences(result: GateResult) -> list[str]:
    return [f"{check.level}: {check.sentence}" for check in result.checks if check.answer != "pass"]
