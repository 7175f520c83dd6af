"""Token probabilities under the two policies as a map of counts: the diagonal is agreement."""

import math
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from mismatch_probe.report.figures.canvas import NUM_HEAT_LEVELS, SMALL, color, panel
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import ProbabilityScatter

MOST_BINS = 64

Cells = dict[tuple[int, int], int]


def draw(heading: Heading, scatter: ProbabilityScatter, most_bins: int = MOST_BINS) -> Panel:
    """Darker cells hold more tokens, in steps of a constant factor; one path a step keeps the drawing small."""
    num_bins, cells = coarser(scatter, most_bins)

    def on(axes: Axes) -> None:
        axes.set_aspect("equal")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("probability under mu (inference)")
        axes.set_ylabel("probability under pi (training)")
        for level, rows in _levels(cells).items():
            path = Path.make_compound_path(*(_bar(start, y, length, num_bins) for start, y, length in rows))
            axes.add_patch(PathPatch(path, facecolor=color(f"heat-{level}"), linewidth=0))
        axes.plot([0, 1], [0, 1], color=color("muted"), linewidth=0.8, linestyle=(0, (3, 3)))

    return panel(heading, on, (SMALL[0], 3.9))


def coarser(scatter: ProbabilityScatter, most_bins: int = MOST_BINS) -> tuple[int, Cells]:
    """Bins and counts, with neighbouring bins joined until the map has at most `most_bins` a side."""
    factor = math.ceil(scatter.num_bins / most_bins)
    cells: Cells = defaultdict(int)
    for x, y, count in scatter.cells:
        cells[x // factor, y // factor] += count
    return math.ceil(scatter.num_bins / factor), cells


def _levels(cells: Cells) -> dict[int, list[tuple[int, int, int]]]:
    """Runs of neighbouring cells `(first x, y, length)` by level of count, on a logarithmic scale."""
    scale = math.log(max(cells.values(), default=1)) or 1.0
    by_level: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    previous: tuple[int, int, int] | None = None
    for y, x in sorted((y, x) for x, y in cells):
        level = 1 + round((NUM_HEAT_LEVELS - 1) * math.log(cells[x, y]) / scale)
        if previous == (level, y, x - 1):
            start, _, length = by_level[level].pop()
            by_level[level].append((start, y, length + 1))
        else:
            by_level[level].append((x, y, 1))
        previous = (level, y, x)
    return dict(sorted(by_level.items()))


def _bar(start: int, y: int, length: int, num_bins: int) -> Path:
    left, right, bottom, top = (edge / num_bins for edge in (start, start + length, y, y + 1))
    return Path([(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)], closed=True)
