"""`docs/causes.md` has a section for every cause that the code can name, under its kind, and for no other."""

import re

import pytest

from mismatch_probe.causes import SeenIn
from mismatch_probe.causes.comparison import Code
from mismatch_probe.causes.training import EndCause
from tests.docs.pages import DOCS, Page

PAGE = Page.read(DOCS / "causes.md")
_OF_TRAINING = "Training runs"
_LABELS = ("Looks like", "Comes about", "Fix")


def sections(page: Page) -> dict[str, tuple[str, str]]:
    """The kind and the text of each code's section."""
    words_by_code: dict[str, tuple[str, str]] = {}
    for part in page.text.split("\n## ")[1:]:
        kind = part.splitlines()[0]
        for section in part.split("\n### ")[1:]:
            heading, _, text = section.partition("\n")
            code = heading.strip("`")
            assert code not in words_by_code, f"{code} stands there twice"
            words_by_code[code] = (kind, text)
    return words_by_code


def known_kinds() -> dict[str, str]:
    """The heading under which each code belongs."""
    return {cause.value: _OF_TRAINING for cause in EndCause} | {code.value: code.kind.title() for code in Code}


def test_every_cause_has_its_section_under_its_kind_and_no_other_has() -> None:
    assert {code: kind for code, (kind, _) in sections(PAGE).items()} == known_kinds()


@pytest.mark.parametrize("code", sections(PAGE))
def test_a_section_says_what_it_looks_like_how_it_comes_about_and_what_mends_it(code: str) -> None:
    text = sections(PAGE)[code][1]
    assert tuple(re.findall(r"^- \*\*(.+?):\*\* \S", text, re.MULTILINE)) == _LABELS


def _is_of_report(code: Code) -> bool:
    """Whether one sentence of the catalogue is what a verdict says; `explain` words its own by the side."""
    return code.entry.seen_in is not SeenIn.PASSES and not code.template.startswith("{what")


@pytest.mark.parametrize("code", [code for code in Code if _is_of_report(code)])
def test_a_section_quotes_the_sentence_of_the_report(code: Code) -> None:
    [quoted] = re.findall(r"^> (.+)$", sections(PAGE)[code][1], re.MULTILINE)
    assert quoted == re.sub(r"\{[^}]*\}", "…", code.template)


def test_a_code_that_is_missing_or_unknown_is_seen() -> None:
    without = Page(PAGE.path, PAGE.text.replace("### `positions`", "### `position`"))
    assert sections(without).keys() ^ known_kinds().keys() == {"positions", "position"}
