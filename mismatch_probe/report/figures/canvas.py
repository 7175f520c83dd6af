"""Drawing with matplotlib in the page's style. Colours are stand-ins that become the page's CSS variables."""

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mismatch_probe.dtypes import Dtype
from mismatch_probe.inert import plain
from mismatch_probe.report.figures.svg import for_page
from mismatch_probe.report.names import OTHER_COLORS, PairStyle
from mismatch_probe.report.view import Heading, Panel

NUM_HEAT_LEVELS = 7
WIDE = (5.6, 3.5)
SMALL = (4.3, 3.2)
"""Width and height in inches of a drawing that shares its row with one other, or with two."""


_ROLES = (
    "ink",
    "muted",
    "grid",
    "truncate",
    "mask",
    "reject",
    *Dtype,
    *OTHER_COLORS,
    *(f"heat-{level}" for level in range(1, NUM_HEAT_LEVELS + 1)),
)
_STAND_INS = {role: f"#f0{number:02x}0d" for number, role in enumerate(_ROLES)}
_MARKERS_A_LINE = 10
_FEW_POWERS = 100.0
_LEAST_SPAN = 5.0
"""Highest over lowest of a logarithmic y axis: what hardly differs is drawn so, and two of its ticks are in sight."""
_NOTHING_DRAWN = "Nothing to draw: too few responses, or no deviation."
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def color(role: str) -> str:
    """The stand-in for the page's `--fig-ROLE`."""
    return _STAND_INS[role]


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mismatch-probe",
    "font.size": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": color("muted"),
    "axes.labelcolor": color("muted"),
    "axes.labelsize": 11.5,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": color("grid"),
    "grid.linewidth": 0.8,
    "xtick.color": color("muted"),
    "ytick.color": color("muted"),
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": color("ink"),
    "text.parse_math": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def panel(heading: Heading, draw: Callable[[Axes], object], size: tuple[float, float] = WIDE) -> Panel:
    """What `draw` puts on one pair of axes, as inline SVG, or words where that is nothing; the same drawing gives the
    same bytes. What a stranger wrote is inert, and no formula.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if not axes.has_data():
            words_inside(axes, _NOTHING_DRAWN, 0.02, 0.5)
        for words in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
            words.set_text(plain(words.get_text()))
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the browser has its own fonts
            FigureCanvasSVG(figure).print_svg(buffer, metadata=_NO_METADATA)  # type: ignore[no-untyped-call]
    colors = {stand_in: f"var(--fig-{role})" for role, stand_in in _STAND_INS.items()}
    return Panel(heading, Markup(for_page(buffer.getvalue(), heading, colors)))


def logarithmic(axes: Axes, axis: str, write: Callable[[float], str] | None = None) -> None:
    """Make `axis` ("x" or "y") logarithmic once everything is drawn; `write` writes its ticks, by default as `10⁻³`."""
    getattr(axes, f"set_{axis}scale")("log")
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    low, high = sorted(chosen.get_view_interval())
    if axis == "y" and high / low < _LEAST_SPAN:
        middle, room = math.sqrt(low * high), math.sqrt(_LEAST_SPAN)
        chosen.set_view_interval(middle / room, middle * room, ignore=True)
    if high / low < _FEW_POWERS:
        chosen.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: (write or power_of_ten)(value)))


def power_of_ten(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    if -2 < exponent < 4:
        return f"{value:g}"
    leading = f"{value / 10.0**exponent:.2g}"
    power = f"10{superscript(exponent)}"
    return power if leading == "1" else f"{leading}·{power}"


def superscript(number: int) -> str:
    return str(number).translate(_SUPERSCRIPTS)


def line(axes: Axes, x: list[float], y: list[float], style: PairStyle) -> None:
    """A pair's curve: colour, dash and marker together; nothing where it has no point."""
    if not x:
        return
    axes.plot(
        x,
        y,
        color=color(style.color),
        linestyle=(0, style.dash) if style.dash else "-",
        marker=style.marker,
        markeredgewidth=0,
        markevery=max(1, len(x) // _MARKERS_A_LINE),
    )


def big_marker(axes: Axes, x: float, y: float, style: PairStyle) -> None:
    axes.plot([x], [y], color=color(style.color), marker=style.marker, markersize=7.5, markeredgewidth=0)


def band(axes: Axes, x: list[float], low: list[float], high: list[float], style: PairStyle, alpha: float) -> None:
    if not x:
        return
    axes.fill_between(x, low, high, color=color(style.color), alpha=alpha, linewidth=0)


def words_inside(axes: Axes, text: str, x: float, y: float, *, right: bool = False) -> None:
    """A few muted words at a fraction of the axes' size."""
    axes.text(
        x, y, text, transform=axes.transAxes, color=color("muted"), fontsize=10.5, ha="right" if right else "left"
    )
