"""What is drawn, as plotly.js reads it."""

from dataclasses import dataclass, field
from typing import Any, Literal

Axis = Literal["x", "y"]
Properties = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """Traces and layout in plotly's JSON, with plotly's names of their properties.

    Plotly's own objects check each property when it is set, which takes ten times as long; the tests have them check
    what is drawn.
    """

    traces: list[Properties] = field(default_factory=list)
    layout: Properties = field(default_factory=dict)

    def add_scatter(self, **properties: Any) -> None:
        self.traces.append({"type": "scatter", **properties})

    def add_bar(self, **properties: Any) -> None:
        self.traces.append({"type": "bar", **properties})

    def add_heatmap(self, **properties: Any) -> None:
        self.traces.append({"type": "heatmap", **properties})

    def add_annotation(self, **properties: Any) -> None:
        self.layout.setdefault("annotations", []).append(properties)

    def add_shape(self, kind: Literal["line", "rect"], axis: Axis, start: float, end: float, **properties: Any) -> None:
        """From `start` to `end` of an axis, over the whole of the other."""
        other = "y" if axis == "x" else "x"
        place = {f"{axis}0": start, f"{axis}1": end, f"{axis}ref": axis}
        across = {f"{other}0": 0, f"{other}1": 1, f"{other}ref": f"{other} domain"}
        self.layout.setdefault("shapes", []).append({"type": kind, **place, **across, **properties})

    def update_axis(self, axis: Axis, **properties: Any) -> None:
        self.layout.setdefault(f"{axis}axis", {}).update(properties)
