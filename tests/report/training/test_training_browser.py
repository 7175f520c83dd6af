"""In a real browser: the page of a training run is drawn, fits a phone and runs nothing."""

from pathlib import Path

import pytest

from mismatch_probe.report.training.page import write_training_report
from tests.report.browser import Tab, needs_browser
from tests.report.test_browser import PROBE
from tests.report.training.training_runs import TrainingSample, firing, training_run

pytestmark = [pytest.mark.slow, needs_browser]


def write_page(folder: Path, hostile: str) -> Path:
    sample = TrainingSample(model=hostile, firings=(firing(3, ["rollback"], guard=hostile, sentence=hostile),))
    runs = [training_run(folder / name, sample) for name in ("one", "x" * 120)]
    path = folder / "report.html"
    write_training_report(runs, path)
    return path


def test_the_page_is_drawn_at_every_width_and_runs_nothing_that_a_stranger_wrote(tab: Tab, tmp_path: Path) -> None:
    path = write_page(tmp_path, PROBE + "x" * 300)
    tab.console.clear()
    for width in (400, 1280):
        tab.open(path, width)
        tab.draw_all()
        assert tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert tab.run("document.documentElement.dataset.ran") is None
    assert tab.console == []


def test_a_firing_that_is_pointed_at_says_what_a_stranger_wrote_as_text(tab: Tab, tmp_path: Path) -> None:
    path = write_page(tmp_path, f"<b>bold</b>{PROBE}")
    drawing = "document.querySelector('#plot-guards-run-1 .drawing')"
    tab.console.clear()
    tab.open(path)
    tab.run("document.querySelectorAll('.whole').forEach((fold) => (fold.open = true))")
    tab.run("document.querySelector('#plot-guards-run-1').scrollIntoView()")
    tab.wait(f"{drawing}?.querySelector('.main-svg')")
    tab.run(f"Plotly.Fx.hover({drawing}, [{{curveNumber: 0, pointNumber: 0}}])")
    tab.wait(f"{drawing}.querySelector('.hovertext')")
    hover_text = tab.run(f"{drawing}.querySelector('.hovertext').textContent")
    assert "<b>bold</b><script>" in hover_text
    assert "go back to the last good checkpoint" in hover_text
    assert tab.run(f"{drawing}.querySelector('.hovertext b, .hovertext script, .hovertext [style*=bold]')") is None
    assert tab.run("document.documentElement.dataset.ran") is None
    assert tab.console == []
