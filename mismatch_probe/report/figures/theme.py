"""How every drawing looks: plotly's template in the page's style. Colours are the page's CSS variables, which the page
puts in when it draws, so that one specification serves light and dark.
"""

from typing import Any, Final

NUM_HEAT_LEVELS: Final = 7
WIDE: Final = 340
SMALL: Final = 260
"""Height in pixels of a drawing that shares its row with one other, or with two."""

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
        "font": {"color": color("muted"), "size": 12, "family": "var(--sans)"},
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
