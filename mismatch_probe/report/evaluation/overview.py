"""Accuracy under both policies and the gap between them, one place a pair, with intervals.

The top of an evaluation's page: does deployment lose accuracy, by how much, how sure is that, what next.

The evaluation on one screen; plain lines where the output is no terminal.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rich.console import Console

from mismatch_probe.dtypes import side_label
from mismatch_probe.inert import shortened
from mismatch_probe.notation import write_count, write_estimate, write_many, write_percent
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.evaluation.answer import (
    advice,
    badge,
    capital,
    headline,
    pair_name,
    pairs_table,
    sentence,
    tables,
    without_sign,
    worst,
)
from mismatch_probe.report.figures.canvas import hover_estimate, limit_line, marks, panel, said
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.pairs import short_answer
from mismatch_probe.report.screen import print_advice, print_fitting, print_line, print_room
from mismatch_probe.report.view import Badge, Block, Drawing, Figure, Finding, Heading, Overview, Panel, Section, Tile
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


def evaluation_overview(evaluation: Evaluation) -> Overview:
    """Of an evaluation that is finished."""
    pair = worst(evaluation.pairs)
    return Overview(
        subject="accuracy under both policies",
        model=evaluation.model,
        headline=headline(evaluation.pairs),
        tiles=_tiles(evaluation, pair),
        badge=badge(pair),
        facts=_facts(evaluation),
        advice=advice(evaluation),
        table=pairs_table(evaluation),
        footnote="Brackets: intervals clustered by problem. Under pi: the engine's responses, each weighing pi/mu. "
        "ESS: the share of the responses that these weights leave.",
        contrasts=[],
        figure=accuracy_figure(evaluation),
    )


def evaluation_section(evaluation: Evaluation, summary: Summary) -> Section:
    """What each pair's numbers say, the engines, and where the log-probs themselves stand."""
    blocks: list[Block] = [
        Finding(f"accuracy-{number}", pair_name(pair), badge(pair), f"{capital(sentence(pair))}.", [])
        for number, pair in enumerate(evaluation.pairs, start=1)
    ]
    blocks += [table for table in tables(evaluation) if table.caption != "Pairs"]
    behind = Badge.of(summary.verdict)
    blocks.append(Finding("accuracy-mismatch", "The mismatch behind it", behind, short_answer(summary), []))
    return Section(
        "accuracy",
        "What the responses earned",
        f"Task {evaluation.task}. The sections below are those of a comparison: what the two sides' log-probs are.",
        blocks,
    )


def _tiles(evaluation: Evaluation, pair: PairAccuracy) -> list[Tile]:
    engine = next(engine for engine in evaluation.engines if engine.infer == pair.infer)
    accuracy, cut = write_estimate(engine.accuracy), engine.truncated_responses / engine.accuracy.num_sequences
    tiles = [
        Tile(
            f"Accuracy of the engine in {side_label(pair.infer)}",
            accuracy.value,
            f"{accuracy.interval}; {write_percent(cut)} of the responses were cut",
        )
    ]
    if pair.gap is not None:
        is_gain = badge(pair).kind == "precision"
        gap = write_estimate(without_sign(pair.gap) if is_gain else pair.gap)
        note = "; ".join(part for part in (gap.interval, "0 is no gap") if part)
        tiles.append(
            Tile(f"{pair_name(pair)}: accuracy that deployment {'gains' if is_gain else 'loses'}", gap.value, note)
        )
    return [*tiles, Tile("Responses", write_count(engine.accuracy.num_sequences), _problems(pair))]


def _problems(pair: PairAccuracy) -> str:
    estimate = pair.under_mu
    if estimate is None or estimate.num_prompts is None:
        return "of each engine"
    return f"of each engine, to {write_many(estimate.num_prompts, 'problem')}"


def _facts(evaluation: Evaluation) -> list[str]:
    sampled = "pi sampled responses of its own" if evaluation.settings.sample_pi else "responses of the engines alone"
    return [f"task {evaluation.task}", sampled]


def render_evaluation(evaluation: Evaluation, console: Console) -> None:
    """The answer, accuracy of engines and of pairs under both policies, a sentence a pair, and what to do next."""
    answer = headline(evaluation.pairs)
    print_room(console)
    print_line(console, answer, style="bold")
    for table in tables(evaluation):
        print_line(console, "")
        print_fitting(console, table, can_lack=set())
    told = [said for pair in evaluation.pairs if (said := f"{capital(sentence(pair))}.") != answer]
    if told:
        print_line(console, "")
    for said in told:
        print_line(console, said)
    if todo := advice(evaluation):
        print_line(console, "")
        print_advice(console, todo)
