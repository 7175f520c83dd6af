"""Plotly knows every property and every value of every kind of drawing, which the package puts together by itself."""

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from mismatch_probe.difference.page import render_difference_page
from mismatch_probe.difference.runs import difference_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.figures.canvas import at_height, logarithmic, panel
from mismatch_probe.report.figures.drawing import Drawing
from mismatch_probe.report.figures.theme import theme
from mismatch_probe.report.filed import Filed
from mismatch_probe.report.findings import render_document
from mismatch_probe.report.page import render_html
from mismatch_probe.report.view import Heading
from tests.report import samples
from tests.report.documents import headroom, localization
from tests.report.pages import drawings
from tests.report.test_evaluation_page import evaluation, pair
from tests.report.training.test_training_page import COLLAPSE, page_of
from tests.report.training.training_runs import TrainingSample
from tests.simulated_run import Simulation, simulated_run

HEADING = Heading("here", "A title", "A description")


def understood(specification: dict[str, Any]) -> bool:
    """Whether plotly takes it, and for what it is.

    Raises:
        ValueError: a property or a value is unknown to plotly.
    """
    figure = json.loads(go.Figure(**specification).to_json())
    figure["layout"].pop("template", None)
    return bool(figure == specification)


def of_a_comparison(folder: Path) -> str:
    return render_html(samples.summary(), samples.manifest(), Filed(evaluation=evaluation(pair(Dtype.BF16))))


def of_training(folder: Path) -> str:
    return page_of(folder, COLLAPSE, TrainingSample())


def of_a_difference(folder: Path) -> str:
    runs = (simulated_run(folder / name, Simulation(num_prompts=24, mean_length=30)) for name in ("first", "second"))
    return render_difference_page(difference_of(*runs))


def of_headroom(folder: Path) -> str:
    return render_document(headroom(1e5))


def of_a_localization(folder: Path) -> str:
    return render_document(localization(suspect_layer=5))


@pytest.mark.parametrize("page", [of_a_comparison, of_training, of_a_difference, of_headroom, of_a_localization])
def test_every_drawing_of_a_page_is_understood(tmp_path: Path, page: Any) -> None:
    found = drawings(page(tmp_path))
    assert found
    assert [anchor for anchor, specification in found.items() if not understood(specification)] == []


def test_the_theme_is_understood() -> None:
    assert go.layout.Template(theme()).to_plotly_json() == theme()


@pytest.mark.parametrize(
    ("trace", "layout"),
    [({"colour": "red"}, {}), ({"mode": "dots"}, {}), ({}, {"xaxis": {"kind": "log"}}), ({"line": {"wide": 1}}, {})],
)
def test_what_plotly_does_not_know_is_not_understood(trace: dict[str, Any], layout: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        understood({"data": [{"type": "scatter", **trace}], "layout": layout})


def test_a_shorthand_of_plotlys_python_is_not_understood() -> None:
    """`title_text` is nothing for plotly.js."""
    assert not understood({"data": [], "layout": {"xaxis": {"title_text": "tokens"}}})
    assert understood({"data": [], "layout": {"xaxis": {"title": {"text": "tokens"}}}})


def test_marks_at_a_height_stay_there_whatever_becomes_of_the_scale() -> None:
    def draw(figure: Drawing) -> None:
        at_height(figure, [1.0], 0.97, "x-thin-open", "reject")
        logarithmic(figure, "y", [1e-4, 1e-3])

    layout = panel(HEADING, draw).specification["layout"]
    assert layout["yaxis"]["type"] == "log"
    assert "type" not in layout["yaxis2"]
    assert layout["yaxis2"]["range"] == [0, 1]
