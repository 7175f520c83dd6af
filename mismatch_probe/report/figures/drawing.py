"""What plotly.js draws: traces and a layout, in the words of plotly's reference.

Plotly's own objects for it check and copy every value, which takes longer than the rest of a page. What they check is
checked by a test, on the drawings of every kind of page.
"""

from typing import Any, Literal

Axis = Literal["x", "y"]


class Drawing:
    """A drawing that is being made; `data` and `layout` are plotly's."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {}

    def add_scatter(self, **properties: Any) -> None:
        self.data.append({"type": "scatter", **properties})

    def add_bar(self, **properties: Any) -> None:
        self.data.append({"type": "bar", **properties})

    def add_heatmap(self, **properties: Any) -> None:
        self.data.append({"type": "heatmap", **properties})

    def add_annotation(self, **properties: Any) -> None:
        self.layout.setdefault("annotations", []).append(properties)

    def add_line(self, axis: Axis, value: float, **properties: Any) -> None:
        """At `value` of `axis`, right across the drawing."""
        self._add_shape("line", axis, value, value, properties)

    def add_stretch(self, axis: Axis, start: float, end: float, **properties: Any) -> None:
        """From `start` to `end` of `axis`, right across the drawing."""
        self._add_shape("rect", axis, start, end, properties)

    def update_axis(self, axis: Axis, **properties: Any) -> None:
        self.layout.setdefault(f"{axis}axis", {}).update(properties)

    def _add_shape(self, kind: str, axis: Axis, start: float, end: float, properties: dict[str, Any]) -> None:
        other = "y" if axis == "x" else "x"
        place = {f"{axis}0": start, f"{axis}1": end, f"{axis}ref": axis}
        across = {f"{other}0": 0, f"{other}1": 1, f"{other}ref": f"{other} domain"}
        self.layout.setdefault("shapes", []).append({"type": kind, **place, **across, **properties})
