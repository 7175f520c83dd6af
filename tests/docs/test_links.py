"""Every link leads somewhere: to a file, and to a heading in it. Every page is in the site's navigation once."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, Page, pages

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OF_REPOSITORY = re.compile(
    r"(?:docs|reports|examples|benchmarks|scripts|tests|requirements|mismatch_probe)/[\w./-]*\w/?"
)


_OF_PACKAGE = re.compile(r"(?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py")
_CONTRIBUTING = DOCS / "contributing.md"


def broken_links(page: Page) -> list[str]:
    """Links of a page that lead nowhere, and paths of the repository in its prose that are not there."""
    links = [link for link in _LINK.findall(page.prose) if not _leads_somewhere(page, link)]
    return links + [path for path in _named_paths(page) if not (ROOT / path).exists()]


def _leads_somewhere(page: Page, link: str) -> bool:
    if re.match(r"https?://", link):
        return True
    name, _, anchor = link.partition("#")
    path = (page.path.parent / name) if name else page.path
    if not path.exists():
        return False
    return not anchor or anchor in Page.read(path).anchors


def _named_paths(page: Page) -> list[str]:
    return [code for code in page.code_in_prose if _OF_REPOSITORY.fullmatch(code)]


def missing_places(page: Page) -> list[str]:
    """Files and folders of the package that the page sends a contributor to, and that are not there."""
    places = [code for code in page.code_in_prose if _OF_PACKAGE.fullmatch(code)]
    return [place for place in places if not any((root / place).exists() for root in (ROOT / "mismatch_probe", ROOT))]


def left_out_of_the_site(page: Page) -> list[str]:
    """Links of a page of `docs/` to what `make docs` does not take along: all outside but the pages of reports."""
    outside = [link for link in _LINK.findall(page.prose) if link.startswith("../")]
    return [link for link in outside if not re.fullmatch(r"\.\./reports/[\w./-]+\.html", link)]


def others() -> list[Page]:
    """What lies beside the code and the results."""
    return [Page.read(path) for folder in ("reports", "examples") for path in sorted((ROOT / folder).rglob("*.md"))]


@pytest.mark.parametrize("page", [*pages(), *others()], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Page) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", pages()[1:], ids=lambda page: page.name)
def test_every_link_leads_somewhere_on_the_site(page: Page) -> None:
    assert left_out_of_the_site(page) == []


def test_a_link_that_the_site_would_break_is_seen() -> None:
    links = ["../reports/demo/report.html", "../reports/paper/README.md", "gate.md", "https://example.org/a.md"]
    page = Page(DOCS / "faq.md", "".join(f"[there]({link}) " for link in links))
    assert left_out_of_the_site(page) == ["../reports/paper/README.md"]


def test_a_contributor_is_sent_to_files_that_are_there() -> None:
    assert missing_places(Page.read(_CONTRIBUTING)) == []
    assert missing_places(Page(_CONTRIBUTING, "a metric in `stats/none.py` or `none.py`")) == [
        "stats/none.py",
        "none.py",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[gone](gone.md)",
        "[no such part](gate.md#no-such-part)",
        "[nor here](#nowhere)",
        "![no picture](pictures/none.webp)",
        "`reports/none.md`",
        "`docs/none.md`",
    ],
)
def test_a_link_to_nowhere_is_seen(line: str) -> None:
    assert broken_links(Page(DOCS / "faq.md", f"# Questions\n\n{line}\n")) != []


@pytest.mark.parametrize("line", ["[gate](gate.md#the-gate-file)", "[here](#questions)", "`reports/README.md`"])
def test_a_link_that_leads_somewhere_is_let_through(line: str) -> None:
    assert broken_links(Page(DOCS / "faq.md", f"# Questions\n\n{line}\n")) == []


def test_every_page_is_in_the_navigation_once() -> None:
    index = Page.read(DOCS / "index.md")
    listed = [
        line
        for language, body in index.blocks
        if language == "{toctree}"
        for line in body.splitlines()
        if line and not line.startswith(":")
    ]
    assert sorted(listed) == sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")


def test_every_picture_is_shown() -> None:
    shown = {Path(link).name for page in pages() for link in _LINK.findall(page.prose) if "pictures/" in link}
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}
