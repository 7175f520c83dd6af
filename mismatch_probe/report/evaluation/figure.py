"""Accuracy under both policies and the gap between them, one place a pair, with intervals."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mismatch_probe.inert import shortened
from mismatch_probe.notation import write_estimate
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.report.evaluation.answer import pair_name, pairs_table
from mismatch_probe.report.figures.canvas import hover_estimate, limit_line, marks, panel, said
from mismatch_probe.report.figures.drawing import Drawing
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Figure, Heading, Panel
from mismatch_probe.stats.results import Estimate

_NAME_CHARACTERS = 24


class _Shown(NamedTuple):
    name: str
    read: Callable[[PairAccuracy], Estimate | None]
    style: PairStyle


def _sampled(pair: PairAccuracy) -> Estimate | None:
    return None if pair.direct is None else pair.direct.accuracy


def _sampled_gap(pair: PairAccuracy) -> Estimate | None:
    return None if pair.direct is None else pair.direct.gap


_MU, _PI, _DIRECT = PairStyle("truncate", (), "o"), PairStyle("mask", (6, 2), "s"), PairStyle("fp32", (1.5, 1.5), "^")
_ACCURACIES: Final = (
    _Shown("under the engine (mu)", lambda pair: pair.under_mu, _MU),
    _Shown("under the training policy (pi), weighed", lambda pair: pair.under_pi, _PI),
    _Shown("under the training policy, sampled", _sampled, _DIRECT),
)
_GAPS: Final = (
    _Shown("gap, weighed", lambda pair: pair.gap, _PI),
    _Shown("gap, sampled", _sampled_gap, _DIRECT),
)


def accuracy_figure(evaluation: Evaluation) -> Figure:
    """Both drawings; what cannot be told has no mark."""
    present = [shown for shown in _ACCURACIES if any(shown.read(pair) for pair in evaluation.pairs)]
    return Figure(
        "figure-accuracy",
        "How to read it: bars are intervals clustered by problem. Both accuracies are of the same responses, so the "
        "gap is known better than either; where its bar crosses the dotted line, no gap was seen.",
        [
            _panel(
                evaluation,
                Heading("plot-accuracy", "Accuracy", _said(evaluation, _ACCURACIES), "Mean reward of a response."),
                _ACCURACIES,
                "accuracy",
            ),
            _panel(
                evaluation,
                Heading(
                    "plot-gap",
                    "What deployment loses",
                    _said(evaluation, _GAPS),
                    "Accuracy under the training policy less that under the engine; above 0 deployment loses.",
                ),
                _GAPS,
                "gap in accuracy",
                zero=True,
            ),
        ],
        [pairs_table(evaluation)],
        key=[(shown.name, shown.style) for shown in present],
    )


def _panel(
    evaluation: Evaluation, heading: Heading, series: Sequence[_Shown], y_label: str, *, zero: bool = False
) -> Panel:
    names = [pair_name(pair) for pair in evaluation.pairs]
    there = [shown for shown in series if any(shown.read(pair) for pair in evaluation.pairs)]

    def on(figure: Drawing) -> None:
        for number, shown in enumerate(there):
            shift = 0.16 * (number - (len(there) - 1) / 2)
            places = [
                (place + shift, name, estimate)
                for place, (name, pair) in enumerate(zip(names, evaluation.pairs, strict=True))
                if (estimate := shown.read(pair)) is not None
            ]
            if places:
                estimates = [estimate for _, _, estimate in places]
                marks(
                    figure,
                    [place for place, _, _ in places],
                    [estimate.value for estimate in estimates],
                    shown.style,
                    [hover_estimate(name, shown.name, estimate) for _, name, estimate in places],
                    low=[estimate.low for estimate in estimates],
                    high=[estimate.high for estimate in estimates],
                )
        if not figure.traces:
            return
        ticks = [said(shortened(name, _NAME_CHARACTERS, keep="start")) for name in names]
        figure.update_axis("x", tickvals=list(range(len(names))), ticktext=ticks, range=[-0.6, len(names) - 0.4])
        figure.update_axis("y", title={"text": said(y_label)})
        if zero:
            limit_line(figure, 0.0, role="reject")

    return panel(heading, on)


def _said(evaluation: Evaluation, series: Sequence[_Shown]) -> str:
    return "; ".join(
        f"{pair_name(pair)} {shown.name} {write_estimate(estimate)}"
        for pair in evaluation.pairs
        for shown in series
        if (estimate := shown.read(pair)) is not None
    )
