"""In a real browser: pages of findings, evaluations and gates are drawn, fit a phone, and run nothing."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.page import Filed, render_document, render_html
from tests.report import samples
from tests.report.browser import Tab, needs_browser
from tests.report.documents import headroom, localization
from tests.report.test_browser import IMAGE, PROBE
from tests.report.test_evaluation_page import evaluation, pair
from tests.report.test_gate_section import FAILED
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import attacked

MOST_BYTES = 2_500_000
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
