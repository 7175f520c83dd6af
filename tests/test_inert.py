"""The filter between what a stranger wrote and a terminal or a CI log."""

import re
import unicodedata

import pytest

from mismatch_probe.inert import columns_of, lines_of_width, plain

ATTACKS = {
    "clear the screen": "\x1b[2J\x1b[H",
    "set the title": "\x1b]0;pwned\x07",
    "a link": "\x1b]8;;http://x\x1b\\y",
    "one-byte control sequence": "\x9b2J\x90\x9c",
    "write over the line": "passed\r\x08\x08",
    "bidirectional override": "\u202ecod.exe\u202c\u2066\u2069\u061c",
    "zero width": "a\u200bb\u200c\u2060\ufeff",
    "fillers and selectors": "\u115f\u3164\uffa0\u034f\ufe0f\U000e0101\U000e0041",
    "new line": "x\nmismatch-probe gate: pass",
    "line separators": "x\u2028y\u2029z\x85w\x0b\x0c",
    "annotation": "x\n::error title=x::y",
    "stop commands": "::stop-commands::token",
    "more colons": ":::error::y",
    "older command": "x ##[error]y",
    "more signs": "###[add-mask]y",
    "other runner": "##vso[task.setvariable variable=x]y",
    "lone surrogate": "\ud800",
    "many marks": "a" + "\u0335" * 200 + "\u20dd" * 20,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_one_line_of_characters_that_can_be_seen(attack: str) -> None:
    shown = plain(attack)
    assert shown.splitlines() == [shown]
    assert all(unicodedata.category(character)[0] in "LMNPSZ" for character in shown)
    assert not set("\u115f\u3164\uffa0\u034f\ufe0f\U000e0101\u2028\u2029") & set(shown)
    assert "::" not in shown
    assert "##" not in shown
    assert plain(shown) == shown


@pytest.mark.parametrize(
    "text", ["naïve Ω 数学 🙂 हिन्दी", "[bold]x[/bold] :skull:", "a[::2] and [::1]", "# heading ## sub", "C:\\x, 50 %"]
)
def test_an_ordinary_text_stays_as_it_is(text: str) -> None:
    assert plain(text) == text


def test_what_cannot_be_seen_is_named() -> None:
    assert plain("a\u202eb\n\x1b[2J") == "a<U+202E>b↵<U+001B>[2J"
    assert plain("::error::x ##[group]") == ": :error: :x # #[group]"


COMMAND = "`mismatch-probe compare --out runs/mine --resume --dtype fp32`"
SENTENCE = (
    "runs/a/path-without/a-blank/in-it/that-is-longer-than-a-line.jsonl cannot be read: give "
    f"--num-responses-of-a-step 60 % of it, or ({COMMAND}), which does it."
)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_lines_of_a_width_break_at_blanks_alone_and_never_in_a_command(width: int) -> None:
    lines = lines_of_width(SENTENCE, width)
    assert " ".join(lines) == SENTENCE
    units = [*SENTENCE.split(COMMAND)[0].replace("60 %", "60%").split(" ")[:-1], f"({COMMAND}),"]
    assert [unit for unit in units if not any(unit in line.replace("60 %", "60%") for line in lines)] == []
    assert [line for line in lines if columns_of(line) > width and (" " in line and COMMAND not in line)] == []


@pytest.mark.parametrize("width", range(12, 60))
def test_no_line_begins_with_a_number_that_ends_a_sentence_or_ends_between_a_number_and_its_unit(width: int) -> None:
    text = "Bug: temperature 0.700, where the log declares 1. That is of 11 min and 7 % of 64 responses."
    lines = lines_of_width(text, width)
    assert " ".join(lines) == text
    assert [line for line in lines if re.match(r"(1\.|0\.700|%|min|responses)", line)] == []


@pytest.mark.parametrize("text", ["at steps 0, 1, 2, 3, 4, 5, 6, 7, 8.", "of layer1 layer2 layer3 layer4 alone"])
def test_a_list_of_numbers_or_of_names_that_end_in_one_is_broken(text: str) -> None:
    assert max(map(columns_of, lines_of_width(text, 20))) <= 20


def test_a_line_that_fits_keeps_its_blanks() -> None:
    assert lines_of_width("a  b   c", 8) == ["a  b   c"]
    assert lines_of_width("a  b   c", 7) == ["a b c"]


def test_what_a_terminal_shows_in_two_columns_counts_twice() -> None:
    assert columns_of("ab") == 2
    assert columns_of("\u4f60\u597d") == 4
    assert columns_of("a\u0301") == 1
    assert lines_of_width("\u4f60\u597d \u4f60\u597d", 8) == ["\u4f60\u597d", "\u4f60\u597d"]
