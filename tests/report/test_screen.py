import io
from collections.abc import Callable

import pytest
from rich.console import Console

from mismatch_probe.report.screen import print_line, print_table, screen_table

PLACE = "model.layers.0.self_attn.rotary_emb[q]"


def shown(*, terminal: bool, write: Callable[[Console], None]) -> str:
    output = io.StringIO()
    write(Console(file=output, force_terminal=terminal, width=40, color_system=None))
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_are_no_markup(terminal: bool) -> None:
    line = shown(terminal=terminal, write=lambda console: print_line(console, f"The sides differ at {PLACE}."))
    assert "rotary_emb[q]." in line.replace("\n", "")


def test_what_a_stranger_wrote_is_inert() -> None:
    assert "\x1b" not in shown(terminal=False, write=lambda console: print_line(console, "\x1b[31mred"))


def test_a_table_is_whole_where_the_output_is_no_terminal() -> None:
    def write(console: Console) -> None:
        table = screen_table(console, "place", "error")
        table.add_row("a place with a name longer than forty columns", "0.001")
        print_table(console, table)

    assert "a place with a name longer than forty columns" in shown(terminal=False, write=write)
