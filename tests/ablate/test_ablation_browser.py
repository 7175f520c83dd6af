"""The page of an ablation in a real browser, wide and narrow."""

from pathlib import Path

import pytest

from mismatch_probe.ablate.summarise import publish_ablation
from tests.ablate.test_summarise import ablation_run, all_cells
from tests.report.browser import browser_tab, needs_browser

pytestmark = [pytest.mark.slow, needs_browser]

LABEL_IS_TALLER = (
    "(cell) => parseFloat(getComputedStyle(cell, '::before').height) > cell.getBoundingClientRect().height"
)
"""Of a cell on a narrow screen, whose column stands beside it: the label then runs into the next row."""


def test_the_page_draws_its_figure_and_fits_a_wide_and_a_narrow_screen(tmp_path: Path) -> None:
    directory = ablation_run(tmp_path / "run", all_cells())
    publish_ablation(directory)
    with browser_tab() as tab:
        for width in (1280, 400):
            tab.open(directory.report_path, width=width)
            tab.wait("document.querySelectorAll('.js-plotly-plot').length >= 2")
            assert tab.run("document.documentElement.scrollWidth") == width
            assert tab.run(f"[...document.querySelectorAll('.labelled td')].filter({LABEL_IS_TALLER}).length") == 0
            assert tab.console == []
