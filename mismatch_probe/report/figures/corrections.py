"""What correction rules leave of the sample as responses grow."""

from collections.abc import Sequence

import plotly.graph_objects as go

from mismatch_probe.notation import write_count, write_percent
from mismatch_probe.report.figures.canvas import hover, limit_line, line, logarithmic, panel, titles, words_inside
from mismatch_probe.report.figures.theme import SMALL
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

    def on(figure: go.Figure) -> None:
        titles(figure, "first T tokens of a response", "share of the sample left")
        for rule in rules:
            if rule.name in STYLES and rule.by_length:
                lengths = [float(bin_.num_tokens) for bin_ in rule.by_length]
                texts = [_text(rule, bin_) for bin_ in rule.by_length]
                line(figure, lengths, [share_left(bin_) for bin_ in rule.by_length], STYLES[rule.name], texts)
        if not figure.data:
            return
        limit_line(figure, enough)
        figure.update_yaxes(range=[0, _TOP])
        words_inside(figure, write_percent(enough), 0.995, enough / _TOP, right=True)
        logarithmic(figure, "x", [bin_.num_tokens for rule in rules for bin_ in rule.by_length])
        figure.update_xaxes(exponentformat="SI")

    return panel(heading, on, SMALL)


def _text(rule: CorrectionResult, at: CorrectionAtLength) -> str:
    return hover(
        rule.name,
        f"first {write_count(at.num_tokens)} tokens",
        f"{write_percent(share_left(at))} left",
        f"{write_count(at.num_sequences)} responses",
    )
