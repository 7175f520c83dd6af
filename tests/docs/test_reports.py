"""What is committed under reports/ names no folder of the machine that made it, and its pages are in the words of the
present code.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.pictures import sentences, stale_sentences
from tests.docs.pages import ROOT

OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|work|Users|tmp)/\w+")
PAGES = sorted((ROOT / "reports").rglob("*.html"))
_OF_A_RUN = re.compile(r"\d{4}-\d\d-\d\d| · ")
_PART = r'<(h2|figcaption)\b[^>]*>(.*?)</\1>|<p class="lede">(.*?)</p>'


@pytest.mark.slow
def test_no_report_names_a_folder_of_the_machine_that_made_it() -> None:
    named = {
        str(path.relative_to(ROOT)): seen[0]
        for path in (ROOT / "reports").rglob("*")
        if path.is_file() and (seen := OF_A_MACHINE.search(path.read_text(encoding="utf-8")))
    }
    assert named == {}


def test_a_folder_of_a_machine_is_seen() -> None:
    assert OF_A_MACHINE.search("compare --resume --out /home/someone/runs/demo --gate gate.toml")
    assert not OF_A_MACHINE.search("see reports/demo/work/report.html and https://example.org/home/page")


def sentences_of_page(page: str) -> Iterator[str]:
    """Of its titles, of what stands below a title, and of how a figure is to be read; not of facts of a run."""
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    for _, title, lede in re.findall(_PART, body, flags=re.DOTALL):
        text = html.unescape(re.sub(r"<[^>]+>", "", title or lede)).strip()
        yield from (part for part in sentences(text) if not _OF_A_RUN.search(part))


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_in_the_words_of_the_present_code(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    shown = list(sentences_of_page(page))
    assert len(shown) > 30
    assert stale_sentences(shown) == []


@pytest.mark.slow
def test_a_page_in_words_that_were_changed_is_seen() -> None:
    page = (
        "<h2>Worst tokens in context</h2><h2>The most wrong tokens</h2>"
        "<figcaption>How to read it: flat is good. A falling line is better.</figcaption>"
    )
    assert stale_sentences(sentences_of_page(page)) == ["The most wrong tokens", "A falling line is better"]
