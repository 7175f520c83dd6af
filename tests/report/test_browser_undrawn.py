"""In a real browser: a page on paper, and a page or a figure that cannot be drawn."""

from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.report.page import render_html
from tests.report import samples
from tests.report.browser import Tab, needs_browser, shown

pytestmark = [pytest.mark.slow, needs_browser]
MOST_SHEETS = 14
IN_SIGHT = "[...document.querySelectorAll('.plot')].filter((plot) => plot.checkVisibility())"
BUTTONS_OF_FIGURES = "[...document.querySelectorAll('.key, .scale')].some((each) => each.checkVisibility())"


@pytest.fixture(scope="module")
def unscrolled(tab: Tab, drawn_page: str, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    """The page as it is some time after it was opened, when nobody has touched it."""
    shown(tab, drawn_page, tmp_path_factory.mktemp("unscrolled"))
    tab.wait(f"{IN_SIGHT}.length && {IN_SIGHT}.every((plot) => plot.querySelector('.main-svg'))")
    return tab


def test_every_drawing_is_there_without_scrolling(unscrolled: Tab) -> None:
    """As in a picture of the whole page; what is folded opens on request."""
    assert unscrolled.run(f"{IN_SIGHT}.length") > 5
    assert unscrolled.run("scrollY") == 0
    assert unscrolled.run("document.querySelectorAll('.plot:not(:has(.main-svg))').length") > 0


def test_the_page_prints_on_few_sheets_with_its_drawings(unscrolled: Tab) -> None:
    unscrolled.run("dispatchEvent(new Event('beforeprint'))")
    assert unscrolled.run("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))")
    printed = unscrolled.pdf()
    assert 1 < printed.count(b"/Type /Page\n") <= MOST_SHEETS
    unscrolled.run("dispatchEvent(new Event('afterprint'))")


@pytest.fixture(scope="module")
def _laid_out_for_paper(unscrolled: Tab) -> Tab:
    """The page as it is laid out for paper, in a window of another width: that takes seconds, and is done once."""
    unscrolled.run("dispatchEvent(new Event('beforeprint'))")
    unscrolled.call("Emulation.setEmulatedMedia", media="print")
    unscrolled.run("document.body.style.width = '696px'")  # of a sheet; the window stays as it is in printing
    return unscrolled


@pytest.fixture
def on_paper(_laid_out_for_paper: Tab) -> Tab:
    assert _laid_out_for_paper.run("matchMedia('print').matches"), "a test before has put it back on the screen"
    return _laid_out_for_paper


@pytest.fixture
def on_screen_again(on_paper: Tab) -> Tab:
    """The same page after printing."""
    on_paper.run("document.body.style.width = ''")
    on_paper.call("Emulation.setEmulatedMedia", media="")
    on_paper.run("dispatchEvent(new Event('afterprint'))")
    return on_paper


def test_a_printed_drawing_is_as_wide_as_its_place_on_the_paper(on_paper: Tab) -> None:
    wide = "(each) => each.getBoundingClientRect().right"
    beyond = f"""[...document.querySelectorAll('.panel')].filter((panel) =>
        [...panel.querySelectorAll('.main-svg')].some((svg) => ({wide})(svg) > ({wide})(panel) + 1)).length"""
    filled = """[...document.querySelectorAll('.panel')].filter((panel) =>
        panel.querySelector('.main-svg').getBoundingClientRect().width
          > 0.95 * panel.getBoundingClientRect().width).length"""
    panels = on_paper.run("document.querySelectorAll('.panel').length")
    assert panels > 10
    assert on_paper.run(beyond) == 0
    assert on_paper.run(filled) == panels
    assert on_paper.run("[...document.querySelectorAll('details.finding')].every((fold) => fold.open)")
    assert on_paper.run(
        "[...document.querySelectorAll('h2, [open] > summary')].every((each) => "
        "getComputedStyle(each).breakAfter === 'avoid')"
    )


def test_the_headings_of_a_table_are_repeated_on_the_next_sheet(on_paper: Tab) -> None:
    """Chromium repeats no heading row that has a box of a button in it."""
    displays = "[...document.querySelectorAll('th button')].map((each) => getComputedStyle(each).display)"
    assert set(on_paper.run(displays)) == {"contents"}
    on_paper.call("Emulation.setEmulatedMedia", media="screen")
    assert "contents" not in on_paper.run(displays)
    on_paper.call("Emulation.setEmulatedMedia", media="print")


def test_the_words_of_all_printed_drawings_are_of_one_size(on_paper: Tab) -> None:
    """Drawings of a whole row, of half of one and of a third."""
    sizes = on_paper.run(
        "[...document.querySelectorAll('.panel')].map((panel) => panel.querySelector('.xtick text')).filter(Boolean)"
        ".map((tick) => [parseFloat(getComputedStyle(tick).fontSize), tick.getScreenCTM()])"
        ".map(([size, {a, b}]) => size * Math.hypot(a, b))"
    )
    assert len(sizes) > 10
    assert max(sizes) < 1.05 * min(sizes)


def test_paper_says_where_the_tables_are_that_its_captions_speak_of(on_paper: Tab) -> None:
    """They are folded in the file, and would fill many sheets."""
    closed = "[...document.querySelectorAll('figure details:not([open]) > summary')]"
    contents = on_paper.run(f"{closed}.map((each) => getComputedStyle(each, '::after').content)")
    assert contents
    assert all("folded in the file" in content for content in contents)
    assert on_paper.run(f"{closed}.every((each) => each.checkVisibility())")


def test_a_figure_of_several_panels_can_stand_on_two_sheets(on_paper: Tab) -> None:
    """Moved whole, it leaves half of a sheet empty; a panel is not cut."""
    inside = "getComputedStyle(document.querySelector('{}')).breakInside"
    assert on_paper.run(inside.format("#figure-length")) == "auto"
    assert on_paper.run(inside.format("#figure-length .panel")) == "avoid"
    assert on_paper.run(inside.format(".finding")) == "auto"


def test_after_printing_a_drawing_is_as_wide_as_its_place_on_the_screen_again(on_screen_again: Tab) -> None:
    widths = "[...document.querySelectorAll('.plot:has(.main-svg)')].map((plot) => [plot.clientWidth, "
    widths += "plot.querySelector('.main-svg').getBoundingClientRect().width])"
    shown_widths = [pair for pair in on_screen_again.run(widths) if pair[0]]
    assert len(shown_widths) > 10
    assert [pair for pair in shown_widths if abs(pair[0] - pair[1]) > 2] == []
    assert on_screen_again.run("document.querySelectorAll('.main-svg[viewBox]').length") == 0


BROKEN_FLAGS = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const { 0: flag, index } of walker.currentNode.data.matchAll(/--[a-z][\\w.-]*/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, index);
      range.setEnd(walker.currentNode, index + flag.length);
      if (new Set([...range.getClientRects()].map(({ top }) => top)).size > 1) found.push(flag);
    }
  }
  return found;
})()
"""


def test_no_line_of_a_printed_page_ends_inside_a_flag(tab: Tab, tmp_path: Path) -> None:
    advice = "give " + " or ".join(f"--vllm.{'so-long-a-' * number}flag on" for number in range(4))
    finding = SettingFinding(level="warning", side="mu", setting="dtype", what=f"mu was {advice}", advice=advice)
    summary = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))
    page = render_html(summary.model_copy(update={"preflight": [finding] * 3}), samples.manifest())
    shown(tab, page, tmp_path)
    tab.run("dispatchEvent(new Event('beforeprint'))")
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        for width in (640, 696, 720):
            tab.run(f"document.body.style.width = '{width}px'")
            assert tab.run(BROKEN_FLAGS) == []
        assert tab.run("document.querySelector('#settings table').textContent").count("--vllm.so-long-a-flag") == 6
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")
        tab.run("dispatchEvent(new Event('afterprint'))")


PRINTS_AS_IT_OPENS = """
addEventListener("DOMContentLoaded", () => {
  dispatchEvent(new Event("beforeprint"));
  const drawn = [...document.querySelectorAll(".plot")].map((plot) => Boolean(plot.querySelector(".main-svg")));
  document.documentElement.dataset.printed = `${drawn.filter(Boolean).length} of ${drawn.length}`;
});
"""


def test_a_page_that_is_printed_as_it_opens_has_its_drawings(tab: Tab, drawn_page: str, tmp_path: Path) -> None:
    """Before anything came into view, and before the page was idle."""
    added = tab.call("Page.addScriptToEvaluateOnNewDocument", source=PRINTS_AS_IT_OPENS)
    try:
        drawn, total = shown(tab, drawn_page, tmp_path).run("document.documentElement.dataset.printed").split(" of ")
    finally:
        tab.call("Page.removeScriptToEvaluateOnNewDocument", **added)
    assert drawn == total
    assert int(total) > 10
    assert tab.console == []


def test_a_page_without_drawings_that_is_printed_does_not_say_that_they_failed(
    tab: Tab, drawn_page: str, tmp_path: Path
) -> None:
    page = drawn_page.replace('<div class="plot"', "<div")
    shown(tab, page, tmp_path).run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run("document.documentElement.dataset.figures") is None
    tab.run("dispatchEvent(new Event('afterprint'))")


def test_a_page_whose_plotly_was_changed_says_that_it_cannot_draw(tab: Tab, drawn_page: str, tmp_path: Path) -> None:
    start = drawn_page.index('id="plotlyjs">') + len('id="plotlyjs">')
    shown(tab, f"{drawn_page[:start]}{'A' * 64}{drawn_page[start + 64 :]}", tmp_path)
    tab.wait("document.documentElement.dataset.figures === 'failed'")
    assert tab.run("getComputedStyle(document.querySelector('.no-figures')).display") == "block"
    assert not tab.run(BUTTONS_OF_FIGURES)


FIRST_DRAWING_THROWS = """
let plotly;
Object.defineProperty(window, "Plotly", {
  get: () => plotly,
  set: (given) => {
    const newPlot = (drawing, ...rest) => {
      const isPlanted = drawing.parentElement === document.querySelector(".plot");
      if (isPlanted && !window.isFixed) throw new Error("planted");
      return given.newPlot(drawing, ...rest);
    };
    plotly = { ...given, newPlot };
  },
});
"""


def test_a_figure_that_cannot_be_drawn_says_so_and_the_others_are_drawn(
    tab: Tab, drawn_page: str, tmp_path: Path
) -> None:
    added = tab.call("Page.addScriptToEvaluateOnNewDocument", source=FIRST_DRAWING_THROWS)
    try:
        shown(tab, drawn_page, tmp_path).run("dispatchEvent(new Event('beforeprint'))")
    finally:
        tab.call("Page.removeScriptToEvaluateOnNewDocument", **added)
    failed = "[...document.querySelectorAll('.plot')].filter((plot) => !plot.querySelector('.main-svg'))"
    assert tab.run(f"{failed}.length") == 1
    assert "could not be drawn" in tab.run(f"getComputedStyle({failed}[0], '::after').content")
    assert tab.run("document.documentElement.dataset.figures") is None
    assert tab.console
    assert all("planted" in line for line in tab.console)
    of_first = "document.querySelector('.panel').querySelector"
    assert tab.run(f"!{of_first}('.scale').checkVisibility()"), "no button on what is not there"
    assert tab.run("[...document.querySelectorAll('.scale')].filter((each) => each.checkVisibility()).length") > 2
    tab.run("window.isFixed = true")
    tab.run("dispatchEvent(new Event('beforeprint'))")
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert tab.run(f"{failed}.length") == 0
    assert tab.run(f"{of_first}('.drawing').checkVisibility() && {of_first}('.scale').checkVisibility()")
    assert tab.run(f"getComputedStyle({of_first}('.plot'), '::after').content") == "none"


def test_without_javascript_the_page_says_why_there_are_no_figures(tab: Tab, drawn_page: str, tmp_path: Path) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown(tab, drawn_page, tmp_path)
        assert "drawn by JavaScript" in tab.run("document.querySelector('header').innerText")
        assert tab.run("getComputedStyle(document.querySelector('.plot')).display") == "none"
        assert tab.run("document.querySelector('button.theme').checkVisibility()") is False
        assert not tab.run(BUTTONS_OF_FIGURES)
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)
