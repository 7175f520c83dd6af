"""In a real browser: a token of a coloured response says its numbers, and links lead to it and away from it."""

from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_number
from mismatch_probe.report.page import render_html
from tests.report import samples
from tests.report.browser import Tab, needs_browser
from tests.report.test_browser import IMAGE, PROBE, shown

PAIRS: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16))
READOUT = "document.querySelector('.readout').textContent"

pytestmark = [pytest.mark.slow, needs_browser]


def page_of(hostile: str = "") -> str:
    """Without its drawings, which no test here looks at."""
    simulation = samples.Simulation(num_responses=16, longest=64, hostile=hostile)
    page = render_html(samples.undrawn(samples.summary(PAIRS, simulation)), samples.manifest(PAIRS))
    return page.replace('<div class="plot"', "<div")


@pytest.fixture(scope="module")
def page() -> str:
    return page_of()


@pytest.fixture
def report(tab: Tab, page: str, tmp_path: Path) -> Tab:
    return shown(tab, page, tmp_path)


def point_at(tab: Tab, number: int) -> None:
    token = f"document.querySelectorAll('.response > bdi > *')[{number}]"
    tab.run(f"{token}.scrollIntoView({{block: 'center'}})")
    x, y = (tab.run(f"{token}.getBoundingClientRect().{side} + 2") for side in ("x", "y"))
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


def test_a_token_that_is_pointed_at_says_its_place_and_its_log_probs(report: Tab) -> None:
    response = samples.summary(PAIRS, samples.Simulation(num_responses=16, longest=64)).pairs[0].worst_responses[0]
    log_pi, log_mu = response.log_pi[3], response.log_mu[3]
    assert log_pi is not None
    assert log_mu is not None
    point_at(report, 3)
    report.wait(f"{READOUT}.startsWith('Token 4 ')")
    text = report.run(READOUT)
    assert f"log mu {log_mu:.4f}" in text
    assert f"d = {write_number(log_pi - log_mu)} nats" in text


def test_a_token_that_was_not_sampled_says_so(report: Tab) -> None:
    point_at(report, 7)
    report.wait(f"{READOUT}.includes('not sampled')")


def test_tokens_are_stepped_through_with_the_keyboard(report: Tab) -> None:
    report.run("document.querySelector('.response').focus()")
    last = report.run("document.querySelector('.response > bdi').children.length")
    for key, number in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("Home", 1)):
        report.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert report.run(READOUT).startswith(f"Token {number} ")


def test_a_row_leads_to_its_token_even_where_that_is_folded_and_the_token_back(report: Tab) -> None:
    link = "[...document.querySelectorAll('a[href$=\"-in-text\"]')].at(-1)"
    anchor = report.run(f"{link}.hash")
    report.run(f"{link}.click()")
    report.wait(f"document.querySelector('{anchor}').closest('details').open")
    report.run(f"document.querySelector('{anchor}').click()")
    report.wait(f"location.hash === '{anchor.removesuffix('-in-text')}'")
    assert report.run("document.querySelector(':target').tagName") == "TR"


def test_what_a_model_wrote_stays_text_beside_its_numbers(tab: Tab, tmp_path: Path) -> None:
    shown(tab, page_of(f"<b>bold</b>{PROBE}{IMAGE}"), tmp_path)
    point_at(tab, 3)
    tab.wait(f"{READOUT}.includes('<b>bold</b>')")
    assert tab.run("document.querySelectorAll('.readout *, .response b, .response script, .response img').length") == 0
    assert tab.run("document.documentElement.dataset.ran") is None
    assert tab.console == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_leave_the_text_legible(report: Tab, theme: str) -> None:
    """Contrast of 4.5 to 1 or more, as WCAG asks for."""
    report.run(f"document.documentElement.dataset.theme = '{theme}'")
    contrasts = report.run(CONTRASTS)
    assert len(contrasts) == 10
    assert min(contrasts) >= 4.5


CONTRASTS = """[...document.querySelectorAll(".color-scale dd[class]")].map((step) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const style = getComputedStyle(step);
  const both = [luminance(style.color), luminance(style.backgroundColor)].sort((a, b) => b - a);
  return (both[0] + 0.05) / (both[1] + 0.05);
})"""
