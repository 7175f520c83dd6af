"""Drawings have properties that plotly knows, and values that it takes: its own objects check every kind of page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from mismatch_probe.difference.runs import difference_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.answers.diff import render_difference
from mismatch_probe.report.figures.canvas import theme
from mismatch_probe.report.page import Filed, render_document, render_html
from tests.report import samples
from tests.report.documents import headroom, localization
from tests.report.pages import drawings
from tests.report.test_evaluation_page import evaluation, pair
from tests.report.training.test_training_page import COLLAPSE, limited, page_of
from tests.simulated_run import Simulation, simulated_run

pytestmark = pytest.mark.slow


def compared(folder: Path) -> str:
    filed = Filed(evaluation=evaluation(pair(Dtype.BF16), pair(Dtype.FP16)))
    return render_html(samples.summary(), samples.manifest(), filed)


def differing(folder: Path) -> str:
    runs = [simulated_run(folder / name, Simulation(num_prompts=24, mean_length=30)) for name in ("before", "after")]
    return render_difference(difference_of(*runs))


PAGES: dict[str, Callable[[Path], str]] = {
    "compare, evaluate": compared,
    "diff": differing,
    "headroom": lambda folder: render_document(headroom(1e5)),
    "localize": lambda folder: render_document(localization(suspect_layer=5)),
    "train, stopped": lambda folder: page_of(folder, COLLAPSE),
    "train, with limits": lambda folder: page_of(folder, limited(1e-5)),
}


@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_plotly_knows_all_that_a_page_draws(make: Callable[[Path], str], tmp_path: Path) -> None:
    drawn = drawings(make(tmp_path))
    assert drawn
    for drawing in drawn.values():
        go.Figure(drawing)


def test_plotly_knows_all_of_the_theme() -> None:
    go.layout.Template(theme())


def test_a_theme_that_plotly_does_not_know_is_refused() -> None:
    spoilt = theme()
    spoilt["layout"]["hovermod"] = "closest"
    with pytest.raises(ValueError, match="Invalid property"):
        go.layout.Template(spoilt)


def trace(drawing: dict[str, Any]) -> dict[str, Any]:
    return drawing["data"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda drawing: trace(drawing).update(hovertxt="a"),
        lambda drawing: trace(drawing).update(mode="dots"),
        lambda drawing: drawing["layout"]["xaxis"].update(dticks=1),
        lambda drawing: drawing["layout"].setdefault("shapes", []).append({"type": "lines"}),
    ],
)
def test_a_property_that_plotly_does_not_know_is_refused(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    drawing = drawings(render_document(headroom(1e5)))
    first = next(iter(drawing.values()))
    spoil(first)
    with pytest.raises(ValueError, match=r"Invalid (property|value|element)"):
        go.Figure(first)
