"""In a real browser: pages of findings, evaluations and gates are drawn, fit a phone, and run nothing; contents and
theme follow the reader.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.page import Filed, render_document, render_html
from tests.report import samples
from tests.report.browser import Tab, needs_browser
from tests.report.documents import headroom, localization
from tests.report.test_browser import IMAGE, PROBE, shown
from tests.report.test_evaluation_page import evaluation, pair
from tests.report.test_gate_section import FAILED
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import attacked

MOST_BYTES = 2_520_000
HOSTILE = PROBE + IMAGE + "".join(PAYLOADS.values()) + "x" * 300
PAIR: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)

pytestmark = [pytest.mark.slow, needs_browser]


def judged() -> str:
    """An evaluation that a gate judged."""
    filed = Filed(
        evaluation=attacked(evaluation(pair(Dtype.BF16), pair(Dtype.FP16)), HOSTILE, least=4),
        gate=attacked(FAILED, HOSTILE, least=4),
    )
    return render_html(samples.undrawn(samples.summary(PAIR)), samples.manifest(PAIR), filed)


PAGES: dict[str, Callable[[], str]] = {
    "headroom": cache(lambda: render_document(attacked(headroom(1e5), HOSTILE))),
    "localize": cache(lambda: render_document(attacked(localization(suspect_layer=5), HOSTILE))),
    "evaluation and gate": cache(judged),
}


@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_a_page_is_small_is_drawn_at_every_width_and_runs_nothing(
    tab: Tab, make: Callable[[], str], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(make(), encoding="utf-8", errors="backslashreplace")
    assert path.stat().st_size <= MOST_BYTES
    tab.console.clear()
    for width in (400, 1280):
        tab.open(path, width)
        tab.draw_all()
        assert tab.run("document.querySelectorAll('.plot .main-svg').length") > 0
        assert tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert tab.run("document.documentElement.dataset.ran") is None
        assert tab.run("document.title") != "pwned"
    assert tab.console == []


@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_without_javascript_the_answer_and_the_tables_are_there(
    tab: Tab, make: Callable[[], str], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(make(), encoding="utf-8", errors="backslashreplace")
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(path)
        header = tab.run("document.querySelector('header').innerText")
        assert "drawn by JavaScript" in header
        assert tab.run("document.querySelector('h1').innerText")
        assert tab.run("document.querySelectorAll('table').length") > 1
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.fixture(scope="module")
def without_drawings(page: str) -> str:
    """Nothing is drawn that the test does not look at."""
    return page.replace('<div class="plot"', "<div")


def test_the_chosen_theme_is_there_again_after_a_reload(tab: Tab, without_drawings: str, tmp_path: Path) -> None:
    shown(tab, without_drawings, tmp_path)
    assert tab.run("document.documentElement.dataset.theme ?? ''") == ""
    tab.run("document.querySelector('.theme').click()")
    tab.open(tmp_path / "page.html")
    assert tab.run("document.documentElement.dataset.theme") == "dark"
    assert tab.run("document.querySelector('.theme').textContent") == "Light"
    tab.run("document.querySelector('.theme').click()")
    tab.open(tmp_path / "page.html")
    assert tab.run("document.documentElement.dataset.theme ?? ''") == ""


def test_each_entry_of_the_contents_is_marked_once_it_leads_somewhere(
    tab: Tab, without_drawings: str, tmp_path: Path
) -> None:
    shown(tab, without_drawings, tmp_path)
    entries = tab.run("[...document.querySelectorAll('nav a')].map((link) => link.hash)")
    assert len(entries) > 10
    marked = "document.querySelector('nav [aria-current]')?.hash"
    for entry in entries:
        tab.run(f"document.querySelector('nav a[href=\"{entry}\"]').click()")
        tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        tab.wait(f"{marked} === '{entry}'")
    tab.run("location.hash = ''; scrollTo(0, 0)")
    tab.wait(f"{marked} === '#answer'")


@pytest.mark.parametrize("width", [400, 1280])
def test_each_entry_of_the_contents_is_marked_once_the_page_is_scrolled_there(
    tab: Tab, without_drawings: str, width: int, tmp_path: Path
) -> None:
    """Nothing is named by the address. Where the page ends before a section is at the top, its last one is marked."""
    shown(tab, without_drawings, tmp_path, width)
    entries = tab.run("[...document.querySelectorAll('nav a')].map((link) => link.hash)")
    at_the_top = []
    for entry in entries:
        tab.run(f"document.querySelector('{entry}').scrollIntoView()")
        tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        if tab.run(f"document.querySelector('{entry}').getBoundingClientRect().top") < 20:
            at_the_top.append(entry)
        due = entry if entry in at_the_top else entries[-1]
        tab.wait(f"document.querySelector('nav [aria-current]')?.hash === '{due}'")
    assert len(at_the_top) > 7
