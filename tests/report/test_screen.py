"""A table on the screen is the page's: the same cells, made inert for a terminal."""

import io
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from markupsafe import Markup
from rich.console import Console

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import WrittenNumber
from mismatch_probe.records.summary import Examination, Import
from mismatch_probe.report.answers.doctor import doctor_answer
from mismatch_probe.report.answers.evaluate import evaluation_answer
from mismatch_probe.report.page import answer_on_screen, document_answer, render_document
from mismatch_probe.report.screen import (
    print_answer,
    print_fitting,
    print_line,
    print_table,
    without_intervals,
)
from mismatch_probe.report.view import Answer, Badge, Table
from tests.report import samples
from tests.report.documents import headroom, localization
from tests.report.test_evaluation_page import evaluation, pair

ROWS = [["a\x1b[2J", WrittenNumber("1.5", "[1, 2]"), Badge("bug", "stale"), Markup("<code>{}</code>").format("x < y")]]
TABLE = Table("Found", ["place", "KL", "verdict", "where"], ROWS)


def screen(render: Callable[[Console], None], *, terminal: bool = False) -> str:
    out = io.StringIO()
    render(Console(file=out, width=80, force_terminal=terminal, color_system=None))
    return out.getvalue()


def test_what_doctor_found_of_the_hardware_is_in_words() -> None:
    torch = Import(package="torch", ok=True)
    hardware = {"cpu_cores": 2, "memory_bytes": 25276502016, "gpus": []}
    found = Examination(versions={}, hardware=hardware, imports=[torch, torch], conflicts=[], remarks=[])
    words_on_screen = screen(lambda console: print_answer(doctor_answer(found), console)).split()
    assert " ".join(words_on_screen).startswith("package version hardware cpu cores 2 memory 23.5 GiB gpus none")


def test_a_table_in_a_pipe_is_as_wide_as_what_stands_on_each_line() -> None:
    settings = {"sample-bf16": {"dtype": "bf16", "config": {"hidden_size": "x" * 400}}}
    found = Examination(
        versions={}, hardware={}, imports=[Import(package="torch", ok=True)] * 2, conflicts=[], remarks=[],
        effective_settings=settings,
    )  # fmt: skip
    lines = screen(lambda console: print_answer(doctor_answer(found), console)).splitlines()
    assert "dtype        bf16" in lines
    assert max(map(len, lines)) > 400
    assert all(line == line.rstrip() for line in lines)


def test_what_doctor_found_of_a_stage_is_shown_once_for_all_stages_of_its_side() -> None:
    engine = {"dtype": "bf16", "layer_types": ["sliding_attention"] * 18}
    path = {"attention": "sdpa", "num_threads": 2}
    found = Examination(
        versions={}, hardware={}, imports=[Import(package="torch", ok=True)] * 2, conflicts=[], remarks=[],
        effective_settings={
            "sample-bf16": engine, "replay-bf16": dict(engine), "score-bf16": path,
            "score-bf16-other-attention": {**path, "attention": "eager"},
        },
    )  # fmt: skip
    text = screen(lambda console: print_answer(doctor_answer(found), console))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("sliding_attention") == 18
    assert "replay-bf16: as sample-bf16" in text
    assert text.count("num_threads") == 1
    assert re.search(r"score-bf16-other-attention +other than in score-bf16\n *[─-]*\n? *attention +eager", text)


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_are_no_markup(terminal: bool) -> None:
    place = "model.layers.0.self_attn.rotary_emb[q]"
    line = screen(lambda console: print_line(console, f"The sides differ at {place}."), terminal=terminal)
    assert "rotary_emb[q]." in line.replace("\n", "")


@pytest.mark.parametrize(
    "render",
    [
        lambda console: print_answer(document_answer(localization()), console),
        lambda console: print_answer(document_answer(headroom()), console),
        lambda console: print_answer(evaluation_answer(evaluation(pair(Dtype.BF16))), console),
        lambda console: print_answer(
            answer_on_screen(samples.summary(((Dtype.BF16, Dtype.BF16),)), Path("runs/mine")), console
        ),
    ],
    ids=["localize", "headroom", "evaluate", "report"],
)
def test_the_first_line_of_a_pipe_says_something(render: Callable[[Console], None]) -> None:
    assert screen(render).splitlines()[0].strip()
    assert not screen(render, terminal=True).splitlines()[0].strip()


def test_what_a_stranger_wrote_is_inert() -> None:
    assert "\x1b" not in screen(lambda console: print_line(console, "\x1b[31mred"))


def test_a_table_is_whole_where_the_output_is_no_terminal() -> None:
    name = "a place with a name longer than eighty columns " * 3
    table = Table("", ["place", "error"], [[name.strip(), "0.001"]])
    assert name.strip() in screen(lambda console: print_table(console, table))


@pytest.mark.parametrize("terminal", [False, True])
def test_every_kind_of_cell_is_written_and_inert(terminal: bool) -> None:
    shown = screen(lambda console: print_table(console, TABLE), terminal=terminal)
    assert re.findall(r"\S.*\S", shown)[-1].split("  ")[0] == "a<U+001B>[2J"
    for cell in ("1.5 [1, 2]", "✕ stale", "x < y"):
        assert cell in shown
    assert "\x1b[2J" not in shown


def test_intervals_can_be_left_out() -> None:
    assert "[1, 2]" not in screen(lambda console: print_table(console, TABLE, without_intervals))


def test_a_caption_stands_above() -> None:
    answer = Answer("test", "demo", "One place.", Badge("clean", "clean"), screen=[TABLE])
    assert screen(lambda console: print_answer(answer, console)).split("\n")[:3] == ["One place.", "", "Found"]


def test_an_indented_line_that_is_too_long_for_a_terminal_is_indented_throughout() -> None:
    shown = screen(lambda console: print_line(console, "  guard: " + "word " * 30), terminal=True)
    assert len(shown.splitlines()) > 1
    assert all(line.startswith("  ") and len(line) <= 80 for line in shown.splitlines())
    assert len(screen(lambda console: print_line(console, "  guard: " + "word " * 30)).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["headroom", "localization"])
def test_every_number_of_the_screen_stands_on_the_page(what: str) -> None:
    if what == "headroom":
        shown = screen(lambda console: print_answer(document_answer(headroom()), console))
        page = render_document(headroom())
    else:
        shown = screen(lambda console: print_answer(document_answer(localization(Dtype.BF16)), console))
        page = render_document(localization(Dtype.BF16))
    text = unescape(re.sub(r"<[^>]+>", "", page))
    numbers = re.findall(r"\d[\d.,]*(?:e-?\d+)?", shown)
    assert len(numbers) > 50
    assert [number for number in numbers if number.rstrip(",.") not in text] == []


NARROW = Table(
    "",
    ["answer", "a limit of several words", "value", "would pass at"],
    [["inconclusive", "abs_logprob_diff max 0.0031 of every pair", "0.0123 %", "0.00352 and more of it"]] * 2,
)


@pytest.mark.parametrize("width", [60, 70, 80])
def test_a_table_that_is_folded_breaks_no_word_and_never_overruns(width: int) -> None:
    out = io.StringIO()
    print_table(Console(file=out, width=width, force_terminal=True, color_system=None), NARROW)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = {word for cells in (NARROW.columns, *NARROW.rows) for cell in cells for word in str(cell).split()}
    assert words <= set(out.getvalue().split())
    assert "0.0123 %" in out.getvalue()


def test_a_sign_stays_with_its_word_and_a_bound_with_the_to_before_it() -> None:
    table = Table(
        "", ["answer", "limit", "bounds"], [["? inconclusive", "a limit of several words", "0.0294 to 0.0829"]]
    )
    out = io.StringIO()
    print_table(Console(file=out, width=44, force_terminal=True, color_system=None), table)
    assert "? inconclusive" in out.getvalue()
    assert re.search(r"0\.0294 to|to 0\.0829", out.getvalue())


def test_words_are_broken_where_a_terminal_has_no_room_for_them() -> None:
    out = io.StringIO()
    print_table(Console(file=out, width=30, force_terminal=True, color_system=None), NARROW)
    assert max(map(len, out.getvalue().splitlines())) <= 30


BF16 = ((Dtype.BF16, Dtype.BF16),)
NUMBERS = Table(
    "",
    ["metric", "first", "second"],
    [["kl_k3", *[WrittenNumber("8.2e-5", "[5.5e-5, 23.4e-5]")] * 2]],
    can_lack_interval=frozenset({1}),
)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, ["kl_k3   8.2e-5 [5.5e-5, 23.4e-5]  8.2e-5 [5.5e-5, 23.4e-5]"]),
        (50, ["kl_k3   8.2e-5             8.2e-5", "        [5.5e-5, 23.4e-5]  [5.5e-5, 23.4e-5]"]),
        (36, ["kl_k3   8.2e-5  8.2e-5", "                [5.5e-5, 23.4e-5]"]),
    ],
)
def test_an_interval_stands_beside_its_number_or_below_it_or_is_left_out_where_it_can_be(
    width: int, lines: list[str]
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    print_fitting(console, NUMBERS)
    assert [line.rstrip() for line in out.getvalue().splitlines()[2:]] == lines
