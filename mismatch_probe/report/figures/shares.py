"""Shares with their intervals, one row each, best first."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from mismatch_probe.notation import write_percent
from mismatch_probe.report.figures.canvas import WIDE, big_marker, color, panel
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import Estimate

_ROW_INCHES = 0.46
_FOOT_INCHES = 0.7


def draw_shares(heading: Heading, rows: Sequence[tuple[str, Estimate, PairStyle]]) -> Panel:
    """A label, a share of 1 with its interval, and whose it is, in each row."""

    def on(axes: Axes) -> None:
        axes.set_ylim(len(rows) - 0.4, -0.75)
        axes.set_yticks([])
        axes.set_xlabel("share of the token KL that it removes")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write_percent(value)))
        axes.axvline(0, color=color("muted"), linewidth=1, zorder=0)
        for row, (label, share, style) in enumerate(rows):
            axes.text(0.01, row - 0.28, label, transform=axes.get_yaxis_transform(), fontsize=10.5)
            if share.low is not None and share.high is not None:
                ends = [share.low, share.high]
                axes.plot(ends, [row, row], color=color(style.color), linewidth=3, solid_capstyle="round", alpha=0.6)
            big_marker(axes, share.value, row, style)

    return panel(heading, on, (WIDE[0], max(WIDE[1], _FOOT_INCHES + _ROW_INCHES * len(rows))))
