"""One answer for the screen and the page, and tables whose columns have title and cell together."""

import io
import re

from rich.console import Console

from mismatch_probe.notation import WrittenNumber
from mismatch_probe.report.rendering import PlotlyJs, render_page
from mismatch_probe.report.screen import print_answer
from mismatch_probe.report.view import Answer, Badge, Column, Lines, Section, Table, Terms

PEOPLE = [("Ada", 36), ("Grace", 85)]
COLUMNS: list[Column[tuple[str, int]]] = [
    Column("name", lambda person: person[0]),
    Column("age", lambda person: WrittenNumber(str(person[1]), "[0, 99]"), can_lack_interval=True),
    *Column.each(["a", "r"], lambda letter: f"has {letter}", lambda letter, person: str(letter in person[0])),
    Column("empty", lambda _: ""),
    Column("note", lambda person: "a sailor" if person[0] == "Grace" else "", is_text=True),
]
TABLE = Table.of("People", PEOPLE, COLUMNS, is_stacked=True)
ANSWER = Answer(
    subject="people",
    model="demo",
    headline="Two <b>people</b> were found.",
    badge=Badge("clean", "found"),
    table=TABLE,
    advice=["Ask them: `ask --all`"],
    further_advice=["Ask them: `ask --all`", "Wait."],
    footnote="Ages in years.",
    sections=[Section("more", "More of them", "", [TABLE])],
    screen=[Lines(["Below."], follows=True), TABLE, Lines(["Apart."]), Terms([("Who", "both")], follows=True)],
)


def shown(answer: Answer, *, terminal: bool = False) -> list[str]:
    out = io.StringIO()
    print_answer(answer, Console(file=out, width=100, force_terminal=terminal, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_has_a_cell_of_each_column_for_each_object_and_no_column_without_one() -> None:
    assert TABLE.columns == ["name", "age", "has a", "has r", "note"]
    assert [row[0] for row in TABLE.rows] == ["Ada", "Grace"]
    assert [row[2:4] for row in TABLE.rows] == [["True", "False"], ["True", "True"]], (
        "each item has a column of its own"
    )
    assert (TABLE.text_columns, TABLE.can_lack_interval, TABLE.is_stacked) == ({4}, {1}, True)


def test_a_screen_begins_with_the_headline_and_ends_with_what_to_do() -> None:
    lines = shown(ANSWER)
    assert lines[:4] == ["Two <b>people</b> were found.", "Below.", "", "People"]
    assert lines[lines.index("Apart.") - 1] == ""
    assert lines[lines.index("Apart.") + 1] == "Who  both"
    assert lines[-5:] == ["", "Next", "  Ask them:", "    ask --all", "  Wait."]


def test_a_terminal_has_a_blank_line_before_the_answer() -> None:
    assert shown(ANSWER, terminal=True)[:2] == ["", "Two <b>people</b> were found."]


def test_a_headline_that_is_last_has_its_command_below_it() -> None:
    last = Answer("gate", "demo", "Undecided.", Badge("undecided", "gate"), screen=ANSWER.screen[1:3], is_last=True)
    assert shown(last)[0] == "People"
    assert shown(last)[-1] == "Undecided."
    with_command = Answer("gate", "demo", "Go on.", Badge("undecided", "gate"), command="go on", is_last=True)
    assert shown(with_command) == ["Go on.", "    go on"]


def test_a_page_says_what_the_screen_says_and_is_a_section_of_another() -> None:
    page = render_page(ANSWER, PlotlyJs.EMBED, tool_version="0", sources=["people.json"], document={})
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[page.index("<header") :]))
    for words in ("Two &lt;b&gt;people&lt;/b&gt; were found.", "People", "Ages in years.", "ask --all", "More of them"):
        assert words in text
    section = ANSWER.as_section("people", "People of this run")
    assert [type(block).__name__ for block in section.blocks] == ["Finding", "Table", "Table"]
    assert section.lede == "Ages in years."
