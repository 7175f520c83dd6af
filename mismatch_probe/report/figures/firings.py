"""Guards over the steps of a run: a row each, a mark at each step at which it fired."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from mismatch_probe.inert import shortened
from mismatch_probe.report.figures.canvas import color, hover, panel, said
from mismatch_probe.report.figures.drawing import Drawing
from mismatch_probe.report.view import Heading, Panel

Effect = Literal["told", "changed", "stopped"]

_LOOKS: Final[dict[Effect, tuple[str, str]]] = {
    "told": ("circle-open", "mask"),
    "changed": ("diamond", "reject"),
    "stopped": ("x", "reject"),
}
_FRAME, _ROW = 80, 30
_NAME_CHARACTERS = 28


class Mark(NamedTuple):
    """A firing: whose, when, what came of it, and what it says line by line."""

    guard: str
    step: int
    effect: Effect
    words: Sequence[str]


def draw_firings(heading: Heading, marks: Sequence[Mark], last_step: int) -> Panel:
    """Guards in the order in which they first fired, from the top."""
    guards = list(dict.fromkeys(mark.guard for mark in sorted(marks, key=lambda mark: mark.step)))

    def on(figure: Drawing) -> None:
        for effect, (symbol, role) in _LOOKS.items():
            there = [mark for mark in marks if mark.effect == effect]
            if there:
                figure.add_scatter(
                    x=[mark.step for mark in there],
                    y=[guards.index(mark.guard) for mark in there],
                    mode="markers",
                    marker={"symbol": symbol, "size": 11, "color": color(role), "line": {"width": 1.6}},
                    hovertext=[hover(f"{mark.guard}, step {mark.step}", *mark.words) for mark in there],
                    hoverinfo="text",
                )
        margin = max(0.5, 0.02 * last_step)
        figure.update_axis("x", range=[1 - margin, last_step + margin], title={"text": "step"})
        figure.update_axis(
            "y",
            tickvals=list(range(len(guards))),
            ticktext=[said(shortened(guard, _NAME_CHARACTERS, keep="start")) for guard in guards],
            range=[len(guards) - 0.5, -0.5],
            fixedrange=True,
        )

    return panel(heading, on, _FRAME + _ROW * max(2, len(guards)))
