"""`docs/reading-the-report.md` lists the sections of a report in their order, and pictures show its words."""

import html
import json
import re

import pytest

from mismatch_probe.report.page import render_html
from scripts.pictures import PICTURES, WORDS, stale_sentences
from tests.docs.pages import DOCS, ROOT, Page
from tests.report.samples import manifest, summary

PAGE = Page.read(DOCS / "reading-the-report.md")
SHOWN: dict[str, list[str]] = json.loads(WORDS.read_text(encoding="utf-8"))


def listed(page: Page) -> list[str]:
    table = page.text.split("| section | answers |")[1].split("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(summary(), manifest())


@pytest.mark.slow
def test_the_parts_that_pictures_are_made_of_are_there(page: str) -> None:
    script = (ROOT / "scripts" / "pictures.py").read_text(encoding="utf-8")
    parts = set(re.findall(r'"#([\w-]+)"', script))
    assert len(parts) > 4
    assert [part for part in parts if f'id="{part}"' not in page] == ["localize-bf16-bf16"]


@pytest.mark.slow
def test_the_sections_of_a_page_are_listed_in_their_order(page: str) -> None:
    titles = [html.unescape(re.sub(r"<[^>]+>", "", title)) for title in re.findall(r"<h2[^>]*>(.*?)</h2>", page)]
    assert len(titles) > 10
    assert [title for title in listed(PAGE) if title in titles] == titles


def test_every_section_that_is_listed_is_one() -> None:
    folder = ROOT / "mismatch_probe" / "report" / "sections"
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    assert [title for title in listed(PAGE) if f'"{title}"' not in source] == []


@pytest.mark.parametrize("name", [picture.name for picture in PICTURES])
def test_a_picture_shows_the_words_of_the_present_code(name: str) -> None:
    assert SHOWN[name]
    assert stale_sentences(SHOWN[name]) == []


def test_what_every_picture_shows_is_recorded() -> None:
    assert sorted(SHOWN) == sorted(picture.name for picture in PICTURES)


def test_a_title_that_was_changed_is_seen() -> None:
    assert stale_sentences(["Verdict on each pair", "Verdict on every pair"]) == ["Verdict on every pair"]
