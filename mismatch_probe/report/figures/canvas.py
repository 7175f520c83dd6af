"""How every drawing looks: plotly's template in the page's style. Colours are the page's CSS variables, which the page
puts in when it draws, so that one specification serves light and dark.

Drawing with plotly: curves, bands, marks and words, in the styles of the page.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap
from typing import Any, Final

from mismatch_probe.inert import plain
from mismatch_probe.notation import write_estimate, write_many, write_power
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Axis, Drawing, Heading, Panel
from mismatch_probe.stats.results import Estimate

NUM_HEAT_LEVELS: Final = 7
WIDE: Final = 340
SMALL: Final = 260
"""Height in pixels of a drawing that shares its row with one other, or with two."""

_WORDS: Final = 12
"""Size of the words of a drawing, in pixels."""
_POWERS_ARE_LARGER: Final = 1.25
"""How many times as large plotly writes ticks that are powers of ten."""
_SYMBOLS: Final = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "": "circle"}


def color(role: str) -> str:
    """The page's `--fig-ROLE`."""
    return f"var(--fig-{role})"


def symbol(marker: str) -> str:
    """Plotly's name of a marker of `names.PairStyle`."""
    return _SYMBOLS[marker]


def dashes(dash: tuple[float, ...]) -> str:
    return ",".join(f"{length:g}px" for length in dash) or "solid"


def theme() -> dict[str, Any]:
    """What all drawings of a page share, as plotly's JSON."""
    axis = {
        "gridcolor": color("grid"),
        "linecolor": color("muted"),
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "exponentformat": "power",
        "title": {"standoff": 8},
    }
    layout = {
        "font": {"color": color("muted"), "size": _WORDS, "family": "var(--sans)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 52, "r": 12, "t": 28, "b": 42},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": color("surface"),
            "bordercolor": color("muted"),
            "font": {"color": color("ink"), "size": 12},
            "align": "left",
        },
        "xaxis": {**axis, "showline": True},
        "yaxis": axis,
        "annotationdefaults": {"font": {"color": color("muted"), "size": 11}, "showarrow": False},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": color("muted"), "activecolor": color("ink")},
    }
    return {"layout": layout}


PlotValues = Sequence[float | None]

_MARKERS_A_LINE = 10
LEAST_SPAN = 5.0
"""Highest over lowest of a logarithmic y axis: what hardly differs is drawn so, and two of its ticks are in sight."""
_ROOM = 1.12
_REACH, _MARGIN = 1.5, 0.05
_FEW_DECADES, _MOST_TICKS = 2, 7
_MOST_OF_A_DECADE = 0.7
_TWO_AND_FIVE = "D2"
"""Plotly's name of ticks at 1, 2 and 5; by itself it would write all nine digits of a power of ten, and of 20 and 50
the first digit alone.
"""
_HOVER_CHARACTERS = 60
_DIGITS = 5


def panel(heading: Heading, draw: Callable[[Drawing], object], height: int = WIDE) -> Panel:
    """What `draw` puts into a figure; the same drawing gives the same bytes."""
    figure = Drawing()
    draw(figure)
    return Panel(heading, _with_few_digits({"data": figure.traces, "layout": figure.layout}), height)


def inert_text(text: str) -> str:
    """`text` as plotly shows it letter by letter: no markup, no line break, nothing unseen."""
    return escape(plain(text))


def hover(*lines: str) -> str:
    """What a point says when it is pointed at, line by line; long ones are broken."""
    return "<br>".join(inert_text(part) for line in lines for part in _broken_lines(line))


def _broken_lines(line: str) -> list[str]:
    return [line] if len(line) <= _HOVER_CHARACTERS else wrap(line, _HOVER_CHARACTERS)


def hover_estimate(name: str, place: str, estimate: Estimate, unit: str = "") -> str:
    """Whose value it is, where, its interval and what it rests on."""
    count = f"{write_many(estimate.num_sequences, 'response')}, {write_many(estimate.num_tokens, 'token')}"
    return hover(name, place, f"{write_estimate(estimate)} {unit}".strip(), count)


def line(
    figure: Drawing,
    x: Sequence[float],
    y: PlotValues,
    style: PairStyle,
    texts: Sequence[str] | None = None,
) -> None:
    """A curve: colour, dash and markers together; nothing where it has no point. `texts` are what its points say."""
    if not len(x):
        return
    every = max(1, len(x) // _MARKERS_A_LINE)
    sizes = [6 if number % every == 0 else 0 for number in range(len(x))]
    marker = {"marker": {"symbol": symbol(style.marker), "size": sizes, "line": {"width": 0}}} if style.marker else {}
    figure.add_scatter(
        x=list(x),
        y=list(y),
        mode="lines+markers" if style.marker else "lines",
        line={"color": color(style.color), "width": 1.8, "dash": dashes(style.dash)},
        legendgroup=style.group,
        **marker,
        **_hover_fields(texts),
    )


def thin_line(figure: Drawing, x: Sequence[float], y: PlotValues, style: PairStyle, dash: str = "solid") -> None:
    """A fitted or secondary curve, which says nothing of its own."""
    figure.add_scatter(
        x=list(x),
        y=list(y),
        mode="lines",
        line={"color": color(style.color), "width": 1, "dash": dash},
        legendgroup=style.group,
        hoverinfo="skip",
    )


def marks(
    figure: Drawing,
    x: Sequence[float],
    y: PlotValues,
    style: PairStyle,
    texts: Sequence[str] | None = None,
    *,
    size: float = 9,
    hollow: bool = False,
    low: PlotValues = (),
    high: PlotValues = (),
) -> None:
    """Single points, with intervals where `low` and `high` are given."""
    error = {}
    if len(low):
        error["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [_distance(end, value) for end, value in zip(high, y, strict=True)],
            "arrayminus": [_distance(value, end) for end, value in zip(low, y, strict=True)],
            "thickness": 1,
            "width": 0,
            "color": color(style.color),
        }
    figure.add_scatter(
        x=list(x),
        y=list(y),
        mode="markers",
        marker={
            "symbol": symbol(style.marker) + ("-open" if hollow else ""),
            "size": size,
            "color": color(style.color),
        },
        legendgroup=style.group,
        **error,
        **_hover_fields(texts),
    )


def band(
    figure: Drawing, x: Sequence[float], low: PlotValues, high: PlotValues, style: PairStyle, alpha: float
) -> None:
    """The area between two curves; where a bound is missing it is broken."""
    for start, end in _bounded_stretches(low, high):
        stretch = slice(start, end)
        figure.add_scatter(
            x=[*x[stretch], *reversed(x[stretch])],
            y=[*low[stretch], *reversed(high[stretch])],
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=color(style.color),
            opacity=alpha,
            legendgroup=style.group,
            hoverinfo="skip",
        )


def at_height(
    figure: Drawing, x: Sequence[float], height: float, shape: str, role: str, texts: Sequence[str] | None = None
) -> None:
    """Marks at one height of the drawing (0 to 1), whatever its scale; `shape` is plotly's name of a symbol.

    `texts` are what they say.
    """
    if not len(x):
        return
    figure.add_scatter(
        x=list(x),
        y=[height] * len(x),
        yaxis="y2",
        mode="markers",
        marker={"symbol": shape, "size": 8, "color": color(role), "line": {"color": color(role), "width": 1.4}},
        cliponaxis=False,
        **_hover_fields(texts),
    )
    figure.layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}


def words_inside(figure: Drawing, text: str, x: float, y: float, *, right: bool = False) -> None:
    """A few muted words at a fraction of the drawing's size."""
    figure.add_annotation(
        text=inert_text(text),
        x=x,
        y=y,
        xref="paper",
        yref="paper",
        showarrow=False,
        xanchor="right" if right else "left",
        yanchor="bottom",
    )


def limit_line(figure: Drawing, value: float, *, role: str = "muted", upright: bool = False) -> None:
    """A dotted line across, or upright; above the curves, for below them a line of the grid covers it."""
    look = {"color": color(role), "width": 1, "dash": "2px,3px"}
    figure.add_shape("line", "x" if upright else "y", value, value, line=look, layer="above")


def tint(figure: Drawing, axis: Axis, start: float, end: float, role: str, opacity: float) -> None:
    """Between two values of an axis, below the curves."""
    look = {"fillcolor": color(role), "opacity": opacity, "line": {"width": 0}}
    figure.add_shape("rect", axis, start, end, layer="below", **look)


def titles(figure: Drawing, x: str, y: str) -> None:
    figure.update_axis("x", title={"text": inert_text(x)})
    figure.update_axis("y", title={"text": inert_text(y)})


def logarithmic(
    figure: Drawing, axis: Axis, values: PlotValues = (), least_span: float = 1.0, *, is_count: bool = False
) -> None:
    """Make `axis` logarithmic. Its range is that of those `values` that are positive, where they are given, so that a
    band that reaches over many powers of ten does not squeeze the curves; it spans a factor of `least_span` or more.
    `is_count`: ticks are `10` and `10k` in place of powers of ten.
    """
    figure.update_axis(axis, type="log", **({"exponentformat": "SI"} if is_count else {}))
    positive = [value for value in values if value is not None and value > 0 and math.isfinite(value)]
    if not positive:
        return
    low, high = min(positive), max(positive)
    if high / low < least_span:
        middle, room = math.sqrt(low * high), math.sqrt(least_span)
        low, high = middle / room, middle * room
    room = max(_ROOM, (high / low) ** 0.06)
    decades = math.log10(high / low)
    figure.fit_axis(axis, [math.log10(low / room), math.log10(high * room)])
    if decades > _FEW_DECADES:
        font = {} if is_count else {"tickfont": {"size": _WORDS / _POWERS_ARE_LARGER}}
        figure.update_axis(axis, dtick=math.ceil(decades / _MOST_TICKS), **font)
    elif decades > _MOST_OF_A_DECADE:
        figure.update_axis(axis, dtick=_TWO_AND_FIVE, tickformat="~g")


def bound_axis(figure: Drawing, values: PlotValues, bounds: PlotValues) -> None:
    """Make the linear y axis hold 0, all `values`, and of their bounds what is near: a very wide interval of few
    responses squeezes no curve.
    """
    values_in_range = [0.0, *(value for value in values if value is not None and math.isfinite(value))]
    reach = _REACH * (max(values_in_range) - min(values_in_range))
    low, high = min(values_in_range) - reach, max(values_in_range) + reach
    values_in_range += [min(max(bound, low), high) for bound in bounds if bound is not None and not math.isnan(bound)]
    margin = _MARGIN * (max(values_in_range) - min(values_in_range))
    if margin:
        figure.fit_axis("y", [min(values_in_range) - margin, max(values_in_range) + margin])


def power_of_ten(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    if -2 < exponent < 4:
        return f"{value:g}"
    leading = f"{value / 10.0**exponent:.2g}"
    power = write_power(10, exponent)
    return power if leading == "1" else f"{leading}·{power}"


def _hover_fields(texts: Sequence[str] | None) -> dict[str, Any]:
    return {"hoverinfo": "skip"} if texts is None else {"hovertext": list(texts), "hoverinfo": "text"}


def _distance(larger: float | None, smaller: float | None) -> float:
    return 0.0 if larger is None or smaller is None else max(0.0, larger - smaller)


def _bounded_stretches(low: PlotValues, high: PlotValues) -> list[tuple[int, int]]:
    """Starts and ends of the stretches in which both bounds are there."""
    has_bounds = [
        lower is not None and upper is not None and math.isfinite(lower) and math.isfinite(upper)
        for lower, upper in zip(low, high, strict=True)
    ]
    edges = [
        number
        for number in range(len(has_bounds) + 1)
        if (number and has_bounds[number - 1]) != (has_bounds[number:] or [False])[0]
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _with_few_digits(value: Any) -> Any:
    """Whole numbers as they are, others to five digits; what is not finite is a gap."""
    if isinstance(value, dict):
        return {name: _with_few_digits(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_few_digits(inner) for inner in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}")
    return value
