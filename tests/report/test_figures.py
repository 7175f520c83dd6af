"""Drawings carry the data they are given."""

import re

import pytest
from matplotlib.figure import Figure

from mismatch_probe.report.figures import scatter
from mismatch_probe.report.figures.canvas import logarithmic, panel, power_of_ten
from mismatch_probe.report.figures.errors import shared_limits
from mismatch_probe.report.figures.svg import for_page
from mismatch_probe.report.view import Heading
from mismatch_probe.stats.results import ErrorHistogram, ProbabilityScatter

HEADING = Heading("here", "A title with <b>", "A description & more")


def test_joining_bins_of_a_map_loses_no_token() -> None:
    found = ProbabilityScatter(100, [(0, 0, 5), (1, 1, 7), (99, 98, 11)])
    num_bins, cells = scatter.coarser(found, most_bins=64)
    assert num_bins == 50
    assert cells == {(0, 0): 12, (49, 49): 11}


def test_a_map_draws_one_path_for_each_level_of_counts() -> None:
    cells = [(x, x, 10 ** (x % 4)) for x in range(16)]
    svg = scatter.draw(HEADING, ProbabilityScatter(16, cells)).svg
    levels = set(re.findall(r"var\(--fig-heat-(\d)\)", svg))
    assert levels == {"1", "3", "5", "7"}


def test_a_drawing_is_named_and_its_name_is_escaped() -> None:
    svg = panel(HEADING, lambda axes: axes.plot([0, 1], [0, 1])).svg
    assert '<title id="here-title">A title with &lt;b&gt;</title>' in svg
    assert '<desc id="here-desc">A description &amp; more</desc>' in svg


def test_markers_of_a_curve_are_styled_once() -> None:
    svg = panel(HEADING, lambda axes: axes.plot([0, 1, 2], [0, 1, 4], "o", color="#123456")).svg
    assert svg.count("<use") == 3
    assert len(re.findall(r'<g[^>]* style="fill: #123456[^"]*">(<use[^>]*>){3}</g>', svg)) == 1
    assert not re.search("<use[^>]*style", svg)


def test_a_style_that_is_not_inherited_stays_where_it_is() -> None:
    """Two half-transparent areas under one half-transparent group would not darken where they overlap."""
    area = '<path style="fill: #123456; opacity: 0.5" d="M 0 0 L 1.25 1 L 0 1 z"/>'
    document = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><g>{area}{area}</g></svg>'
    svg = for_page(document.encode(), HEADING, {})
    assert svg.count('<path style="fill: #123456; opacity: 0.5" d="M0 0L1.2 1L0 1z" />') == 2


def test_text_in_a_drawing_is_text_and_keeps_its_digits() -> None:
    svg = panel(HEADING, lambda axes: axes.text(0, 0, "2.34567e-6")).svg
    assert ">2.34567e-6</text>" in svg


def test_two_drawings_on_one_page_share_no_id() -> None:
    first, second = (panel(Heading(name, "t", "d"), lambda axes: axes.plot([0, 1], [0, 1], "o")).svg for name in "ab")
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (first, second)]
    assert not ids[0] & ids[1]
    assert set(re.findall(r"url\(#([^)]+)\)", first)) <= ids[0]


def test_tails_that_hold_next_to_nothing_do_not_stretch_the_axis() -> None:
    histogram = ErrorHistogram("pi", [-9.0, -8.0, -3.0, -2.0, -1.0], [1, 0, 5000, 5000], 0)
    assert shared_limits([histogram]) == (-3.0, -1.0)


def test_powers_of_ten_read_as_people_write_them() -> None:
    assert [power_of_ten(value) for value in (1e-12, 2e-3, 0.1, 1.0, 100.0, 1e5)] == [
        *("10⁻¹²", "2·10⁻³", "0.1", "1", "100", "10⁵")
    ]


def test_ticks_between_two_powers_are_told_apart() -> None:
    assert [power_of_ten(value) for value in (3e-7, 3.5e-7, 4e-7)] == ["3·10⁻⁷", "3.5·10⁻⁷", "4·10⁻⁷"]


def test_what_hardly_differs_is_drawn_as_hardly_different() -> None:
    axes = Figure().add_subplot()
    axes.plot([1.190e-4, 1.191e-4])
    logarithmic(axes, "y")
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(5)
    labels = [power_of_ten(value) for value in axes.get_yticks() if low <= value <= high]
    assert len(labels) == len(set(labels)) > 1
