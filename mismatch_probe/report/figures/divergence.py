"""KL divergence of every pair on one logarithmic line, with its interval."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from mismatch_probe.notation import write_estimate
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.figures.canvas import WIDE, big_marker, color, logarithmic, panel, words_inside
from mismatch_probe.report.names import pair_label, pair_style
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import Estimate

_ROW_INCHES = 0.62
_LIMIT = 1e-3
_LIMIT_NAME = "NeMo-RL's limit"
_ROOM = 6.0


def draw(heading: Heading, pairs: Sequence[PairSummary], metric: str) -> Panel:
    """Pairs without a positive value of `metric` get their label and no mark."""
    shown = [(pair, pair.metrics[metric]) for pair in pairs if metric in pair.metrics]

    def on(axes: Axes) -> None:
        if not shown:
            axes.set_axis_off()
            return
        bounds = [bound for _, estimate in shown for bound in (estimate.value, estimate.low, estimate.high)]
        numbers = [_LIMIT, *(bound for bound in bounds if bound is not None and bound > 0)]
        left, right = min(numbers) / _ROOM, max(numbers) * _ROOM
        axes.set_xlim(left, right)
        axes.set_ylim(len(shown) - 0.4, -0.75)
        axes.set_yticks([])
        axes.set_xlabel(f"{metric}, nats per token")
        axes.axvline(_LIMIT, color=color("muted"), linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        place = math.log(_LIMIT / left) / math.log(right / left)
        words_inside(axes, f"{_LIMIT_NAME} {_LIMIT:g}", place, 1.015, right=place > 0.5)
        for row, (pair, estimate) in enumerate(shown):
            _row(axes, row, pair, estimate, left)
        logarithmic(axes, "x")

    return panel(heading, on, (WIDE[0], max(WIDE[1], 0.9 + _ROW_INCHES * len(shown))))


def _row(axes: Axes, row: int, pair: PairSummary, estimate: Estimate, left: float) -> None:
    style = pair_style(pair)
    label = f"{pair_label(pair)}   {write_estimate(estimate)}"
    axes.text(0, row - 0.3, label, transform=axes.get_yaxis_transform(), fontsize=11.5)
    if estimate.high is not None and estimate.high > 0:
        low = max(estimate.low or left, left)
        axes.plot([low, estimate.high], [row, row], color=color(style.color), linewidth=3, solid_capstyle="round")
    if estimate.value > 0:
        dash = (0, style.dash) if style.dash else "-"
        axes.plot([left, estimate.value], [row, row], color=color(style.color), linewidth=1, linestyle=dash, alpha=0.55)
        big_marker(axes, estimate.value, row, style)
