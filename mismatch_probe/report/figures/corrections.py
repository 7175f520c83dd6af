"""What correction rules leave of the sample as responses grow."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from mismatch_probe.notation import write_percent, write_token_tick
from mismatch_probe.report.figures.canvas import SMALL, color, line, logarithmic, panel, words_inside
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Heading, Panel
from mismatch_probe.stats.results import CorrectionAtLength, CorrectionResult

STYLES = {
    "token_weight": PairStyle("muted", (1.5, 1.5), "o"),
    "sequence_weight": PairStyle("ink", (), "o"),
    "sequence_truncate_3": PairStyle("truncate", (6, 2), "s"),
    "sequence_mask_3": PairStyle("mask", (6, 2, 1.5, 2), "D"),
    "sequence_reject_geometric_0.999_1.001": PairStyle("reject", (), "^"),
    "sequence_reject_k3_0.01": PairStyle("reject", (1.5, 1.5), "s"),
    "sequence_reject_k1_0.0001": PairStyle("reject", (6, 2), "D"),
}
"""The rules drawn, one of each kind: colour says what a rule does, dash and marker which it is."""

_TOP = 1.04


def share_left(at: CorrectionAtLength) -> float:
    """ESS times the share kept; 0 where nothing is kept."""
    return (at.ess or 0.0) * (1 - at.share_rejected)


def draw(heading: Heading, rules: Sequence[CorrectionResult], enough: float) -> Panel:
    """The share each drawn rule leaves on the first T tokens, against T; a dotted line at `enough`."""

    def on(axes: Axes) -> None:
        axes.set_xlabel("first T tokens of a response")
        axes.set_ylabel("share of the sample left")
        for rule in rules:
            if rule.name in STYLES and rule.by_length:
                lengths = [float(bin_.num_tokens) for bin_ in rule.by_length]
                line(axes, lengths, [share_left(bin_) for bin_ in rule.by_length], STYLES[rule.name])
        axes.axhline(enough, color=color("muted"), linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        axes.set_ylim(0, _TOP)
        words_inside(axes, write_percent(enough), 0.995, enough / _TOP + 0.02, right=True)
        logarithmic(axes, "x", write_token_tick)

    return panel(heading, on, SMALL)
