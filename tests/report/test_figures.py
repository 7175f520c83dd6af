"""Drawings carry the data they are given, and say exactly what they show."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import TokenInContext
from mismatch_probe.report.answers.compare import compare_answer
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    at_height,
    band,
    bound_axis,
    hover,
    inert_text,
    limit_line,
    line,
    logarithmic,
    panel,
    power_of_ten,
    words_inside,
)
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.sections import confidence
from mismatch_probe.report.sections.errors import errors, shared_limits
from mismatch_probe.report.sections.length import draw_budget
from mismatch_probe.report.view import Drawing, Figure, Heading
from mismatch_probe.stats.results import ErrorHistogram, FittedEss, ProbabilityScatter
from tests.report import samples
from tests.report.pages import traces
from tests.report.test_hostile import PAYLOADS

HEADING = Heading("here", "A title with <b>", "A description & more")
STYLE = PairStyle("bf16", (6, 2), "s")


def test_joining_bins_of_a_map_loses_no_token() -> None:
    points = ProbabilityScatter(100, [(0, 0, 5), (1, 1, 7), (99, 98, 11)])
    num_bins, cells = confidence.coarser(points, most_bins=64)
    assert num_bins == 50
    assert cells == {(0, 0): 12, (49, 49): 11}


def test_a_map_holds_every_count_in_its_place() -> None:
    cells = [(x, 15 - x, 10 ** (x % 4)) for x in range(2, 16)]
    [counts] = traces(confidence.draw(HEADING, ProbabilityScatter(16, cells)).specification, type="heatmap")
    seen = {
        (
            round((counts["x0"] + x * counts["dx"]) * 16 - 0.5),
            round((counts["y0"] + y * counts["dy"]) * 16 - 0.5),
        ): count
        for y, row in enumerate(counts["z"])
        for x, count in enumerate(row)
        if count is not None
    }
    assert seen == {(x, y): count for x, y, count in cells}


@pytest.mark.parametrize("most", [1, 2, 1000, 10**9])
def test_each_colour_of_a_map_stands_for_a_constant_factor(most: int) -> None:
    drawn = confidence.draw(HEADING, ProbabilityScatter(4, [(0, 0, 1), (3, 3, most)]))
    stops = [place for place, _ in traces(drawn.specification, type="heatmap")[0]["colorscale"]]
    assert stops[0] == 0
    assert stops[-1] == 1
    assert stops == sorted(stops)
    factors = [right / left for left, right in itertools.pairwise(stops[1:])]
    assert factors == pytest.approx([most ** (1 / 6)] * 6, rel=1e-4)


def test_the_worst_tokens_are_points_that_lead_to_their_rows() -> None:
    token = TokenInContext(
        sequence_id="sums-1/0",
        position=4,
        before="<b>2+2=",
        token="5",
        after="$x$",
        log_pi=math.log(0.25),
        log_mu=math.log(0.75),
        log_ref=None,
    )
    drawn = confidence.draw(HEADING, ProbabilityScatter(4, [(3, 1, 9)]), worst=[(token, "worst-1")])
    [points] = traces(drawn.specification, customdata=["worst-1"])
    assert (points["x"], points["y"]) == ([pytest.approx(0.75)], [pytest.approx(0.25)])
    assert points["hovertext"] == [
        "token 5 of sums-1/0<br>&lt;b&gt;2+2=[5]$x$<br>d = -1.10 nats; click for its row",
    ]


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_plotly_is_fed_no_markup_but_its_own_line_breaks(payload: str) -> None:
    assert not set("<>") & set(inert_text(payload))
    assert not set("<>") & set(hover(payload, payload).replace("<br>", ""))
    assert "\n" not in inert_text(payload)


def test_a_point_says_what_it_was_given() -> None:
    def draw(figure: Drawing) -> None:
        line(figure, [1.0, 2.0], [3.0, 4.0], STYLE, [hover("BF16", "token 1"), hover("BF16", "token 2")])

    [curve] = panel(HEADING, draw).specification["data"]
    assert curve["hovertext"] == ["BF16<br>token 1", "BF16<br>token 2"]
    assert curve["line"]["dash"] == "6px,2px"
    assert curve["marker"]["symbol"] == "square"
    assert curve["legendgroup"] == STYLE.group


def test_what_is_drawn_alike_is_hidden_together_and_nothing_else() -> None:
    groups = {PairStyle(color, dash, marker).group for color in "ab" for dash in ((), (6, 2)) for marker in "os"}
    assert len(groups) == 8


def test_a_band_is_broken_where_a_bound_is_missing() -> None:
    def draw(figure: Drawing) -> None:
        band(figure, [1.0, 2.0, 3.0, 4.0], [0.0, None, 0.0, 0.0], [1.0, 1.0, math.inf, 1.0], STYLE, 0.2)
        band(figure, [1.0, 2.0], [None, None], [1.0, 1.0], STYLE, 0.2)
        band(figure, [1.0, 2.0], [0.0, 0.5], [1.0, 1.5], STYLE, 0.2)

    areas = panel(HEADING, draw).specification["data"]
    assert [(area["x"], area["y"]) for area in areas] == [
        ([1.0, 1.0], [0.0, 1.0]),
        ([4.0, 4.0], [0.0, 1.0]),
        ([1.0, 2.0, 2.0, 1.0], [0.0, 0.5, 1.5, 1.0]),
    ]


def test_numbers_keep_the_digits_that_a_screen_can_show_and_what_is_not_finite_is_a_gap() -> None:
    values = [2.345671e-6, math.nan, math.inf, 1234567.0]
    [curve] = panel(HEADING, lambda figure: line(figure, [1, 2, 3, 4], values, STYLE)).specification["data"]
    assert curve["y"] == [2.3457e-6, None, None, 1234567]


def test_a_drawing_that_shows_nothing_is_left_out_of_its_figure_and_named() -> None:
    nothing, curve = panel(HEADING, lambda figure: None), panel(HEADING, lambda figure: line(figure, [1], [1], STYLE))
    figure = Figure("figure", "How to read it.", [nothing, curve], [])
    assert figure.drawn_panels == [curve]
    assert figure.left_out == f"Left out, for too few responses or no deviation to draw: “{HEADING.title}”."
    assert Figure("figure", "How to read it.", [curve], []).left_out == ""


def test_words_in_a_drawing_are_no_markup() -> None:
    drawn = panel(HEADING, lambda figure: words_inside(figure, "<i>2.34567e-6</i>", 0, 0)).specification
    assert drawn["layout"]["annotations"][0]["text"] == "&lt;i&gt;2.34567e-6&lt;/i&gt;"


def test_tails_that_hold_next_to_nothing_do_not_stretch_the_axis() -> None:
    histogram = ErrorHistogram("pi", [-9.0, -8.0, -3.0, -2.0, -1.0], [1, 0, 5000, 5000], 0)
    assert shared_limits([histogram]) == (-3.0, -1.0)


def test_a_wide_axis_of_errors_keeps_its_ticks_level() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    edges = [float(exponent) for exponent in range(-7, 2)]
    summary.pairs[0].errors[:] = [ErrorHistogram("pi", edges, [100] * 8, 0)]
    section = errors(summary)
    assert section is not None
    figure = section.blocks[0]
    assert isinstance(figure, Figure)
    axis = figure.panels[0].specification["layout"]["xaxis"]
    assert list(axis["tickvals"]) == [-7, -5, -3, -1, 1]
    assert len(axis["ticktext"]) == 5


@pytest.mark.parametrize(("limits", "words"), [((-4.0, 0.0), "ten times"), ((-12.0, 0.0), "100 times")])
def test_the_caption_says_what_a_mark_of_the_axis_of_errors_is(limits: tuple[float, float], words: str) -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    edges = [float(edge) for edge in np.arange(limits[0], limits[1] + 1)]
    histogram = ErrorHistogram("pi", edges, [100] * (len(edges) - 1), 0)
    section = errors(
        summary.model_copy(update={"pairs": [summary.pairs[0].model_copy(update={"errors": [histogram]})]})
    )
    assert section is not None
    figure = section.blocks[0]
    assert isinstance(figure, Figure)
    ticks = figure.panels[0].specification["layout"]["xaxis"]["tickvals"]
    assert f"one mark of the axis to the left is {words} more exact" in figure.caption
    assert {"ten times": 1, "100 times": 2}[words] == ticks[1] - ticks[0]


def test_powers_of_ten_read_as_people_write_them() -> None:
    assert [power_of_ten(value) for value in (1e-12, 2e-3, 0.1, 1.0, 100.0, 1e5)] == [
        *("10⁻¹²", "2·10⁻³", "0.1", "1", "100", "10⁵")
    ]


def test_ticks_between_two_powers_are_told_apart() -> None:
    assert [power_of_ten(value) for value in (3e-7, 3.5e-7, 4e-7)] == ["3·10⁻⁷", "3.5·10⁻⁷", "4·10⁻⁷"]


def test_marks_at_a_height_stay_there_whatever_becomes_of_the_scale() -> None:
    def draw(figure: Drawing) -> None:
        at_height(figure, [1.0], 0.97, "x-thin-open", "reject")
        logarithmic(figure, "y", [1e-4, 1e-3])

    layout = panel(HEADING, draw).specification["layout"]
    assert layout["yaxis"]["type"] == "log"
    assert "type" not in layout["yaxis2"]
    assert layout["yaxis2"]["range"] == [0, 1]


def log_axis(values: list[float | None], least_span: float = LEAST_SPAN) -> dict[str, Any]:
    figure = Drawing()
    logarithmic(figure, "y", values, least_span)
    return figure.layout["yaxis"]  # type: ignore[no-any-return]


def test_what_hardly_differs_is_drawn_as_hardly_different() -> None:
    low, high = log_axis([1.190e-4, 1.191e-4])["range"]
    assert 10 ** (high - low) >= LEAST_SPAN
    assert 10**low < 1.19e-4 < 10**high


def test_an_axis_shows_every_value_that_it_can_and_ignores_what_it_cannot() -> None:
    low, high = log_axis([1e-9, 0.0, -1.0, None, math.inf, 1e-2])["range"]
    assert low < -9
    assert -2 < high < -1


def test_a_long_axis_has_few_ticks() -> None:
    axis = log_axis([1e-30, 1.0])
    low, high = axis["range"]
    assert (high - low) / axis["dtick"] < 9


def test_an_interval_of_few_responses_squeezes_no_curve() -> None:
    figure = Drawing()
    bound_axis(figure, [-0.2, -0.1], [-0.3, 0.1, -4e12, 7e30, math.inf])
    low, high = figure.layout["yaxis"]["range"]
    assert -0.6 < low < -0.3
    assert 0.1 < high < 0.4


def test_an_axis_holds_the_intervals_that_are_near() -> None:
    figure = Drawing()
    bound_axis(figure, [-0.2, -0.1], [-0.25, 0.02])
    low, high = figure.layout["yaxis"]["range"]
    assert low < -0.25 < 0.02 < high
    assert high - low < 0.4


def test_a_limit_is_drawn_above_the_grid_which_would_cover_it() -> None:
    figure = Drawing()
    limit_line(figure, 0.0)
    limit_line(figure, 1.0, upright=True)
    assert [shape["layer"] for shape in figure.layout["shapes"]] == ["above", "above"]


@pytest.mark.parametrize(("infer", "has_interval"), [("bf16", True), ("a-side-of-a-very-long-name", False)])
def test_the_interval_of_a_pair_with_a_long_name_is_left_to_the_table(infer: str, has_interval: bool) -> None:
    summary = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))
    pairs = [summary.pairs[0].model_copy(update={"infer": infer})]
    top = compare_answer(summary.model_copy(update={"pairs": pairs}))
    assert top.figure is not None
    notes = top.figure.panels[0].specification["layout"]["annotations"]
    [label] = [note["text"] for note in notes if "   " in note["text"]]
    assert ("[" in label) is has_interval


def test_the_law_of_the_ess_is_drawn_as_far_as_it_was_computed() -> None:
    """Lengths behind the least share that it is computed for have that share: a line along it would deny the law."""
    [pair] = samples.summary(((Dtype.BF16, Dtype.BF16),)).pairs
    assert pair.length is not None
    fitted = [
        FittedEss(10.0, 0.9),
        FittedEss(100.0, 0.6),
        *(FittedEss(length, 0.45) for length in (200.0, 400.0, 800.0)),
    ]
    drawn = draw_budget(HEADING, [(pair, replace(pair.length, fitted_ess=fitted))], lambda _: STYLE)
    lengths = {x for trace in drawn.specification["data"] if trace.get("mode") == "lines" for x in trace["x"]}
    assert {10.0, 100.0, 200.0} <= lengths
    assert not lengths & {400.0}


def test_the_axis_of_the_first_figure_has_ticks_at_powers_of_ten() -> None:
    """Of two and a half powers of ten plotly by itself writes 2 and 5 between them."""
    top = compare_answer(samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16)))))
    assert top.figure is not None
    assert top.figure.panels[0].specification["layout"]["xaxis"]["dtick"] in (1, "D2")
