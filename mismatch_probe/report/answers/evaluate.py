"""`evaluate`: what deployment loses, as accuracy under both policies with intervals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from mismatch_probe.dtypes import side_label, sides_label
from mismatch_probe.inert import cut_text
from mismatch_probe.notation import (
    ABSENT,
    capital,
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_percent,
)
from mismatch_probe.records.answers import EngineAccuracy, EngineDifference, Evaluation, PairAccuracy
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.figures.canvas import hover_estimate, inert_text, limit_line, marks, panel
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.pairs import short_answer
from mismatch_probe.report.view import (
    Answer,
    Badge,
    Block,
    Column,
    Drawing,
    Figure,
    Finding,
    Heading,
    Lines,
    Panel,
    Section,
    Table,
    Tile,
)
from mismatch_probe.stats.results import Estimate


def sentence(pair: PairAccuracy) -> str:
    """What a pair's numbers say of deployment."""
    name = f"trained in {side_label(pair.train)}, deployed in {side_label(pair.infer)}"
    if pair.undecided is not None:
        advice = "" if pair.direct else "; --sample-pi samples from pi itself"
        return f"{name}: accuracy under pi cannot be estimated from these responses, {pair.undecided}{advice}"
    gap = pair.gap
    if gap is None or gap.low is None or gap.high is None:
        return f"{name}: all responses earned the same, so they cannot show a gap"
    if gap.low <= 0 <= gap.high:
        return f"{name}: no gap seen; one beyond {write_number(max(-gap.low, gap.high))} would have been seen"
    verb = "loses" if gap.value > 0 else "gains"
    return f"{name}: deployment {verb} {write_estimate(without_sign(gap))} of accuracy"


def without_sign(gap: Estimate) -> Estimate:
    """What a loss or a gain comes to."""
    if gap.value >= 0 or gap.low is None or gap.high is None:
        return replace(gap, value=abs(gap.value))
    return replace(gap, value=-gap.value, low=-gap.high, high=-gap.low)


def badge(pair: PairAccuracy) -> Badge:
    """A loss is what somebody has to act on; what overlaps zero is no loss that was seen."""
    gap = pair.gap
    if pair.undecided is not None or gap is None or gap.low is None or gap.high is None:
        return Badge("undecided", "cannot be estimated")
    if gap.low <= 0 <= gap.high:
        return Badge("clean", "no gap seen")
    return Badge("bug", "deployment loses") if gap.value > 0 else Badge("precision", "deployment gains")


def worst(pairs: Sequence[PairAccuracy]) -> PairAccuracy:
    """The pair that somebody has to look at first."""
    return min(pairs, key=lambda pair: (badge(pair).rank, -abs(pair.gap.value if pair.gap else 0)))


def headline(pairs: Sequence[PairAccuracy]) -> str:
    """Whether deployment loses accuracy, of the pair for which it is worst."""
    pair = worst(pairs)
    if len(pairs) > 1 and badge(pair).kind == "clean":
        widest = max(map(_seen_from, pairs))
        return (
            f"No gap in accuracy seen in any of {len(pairs)} pairs. One beyond {write_number(widest)} would have been "
            "seen in each."
        )
    return f"{capital(sentence(pair))}."


def _seen_from(pair: PairAccuracy) -> float:
    """The gap beyond which one would have been seen."""
    gap = pair.gap
    return 0.0 if gap is None or gap.low is None or gap.high is None else max(-gap.low, gap.high)


def advice(evaluation: Evaluation) -> list[str]:
    """What to do next."""
    if any(badge(pair).kind == "bug" for pair in evaluation.pairs):
        return ["Deploy in the format that is trained in, or look below for what moves the log-probs."]
    if all(badge(pair).kind == "clean" for pair in evaluation.pairs):
        return ["For a narrower interval give more `--num-problems`; more responses to the same ones help less."]
    return []


def pair_name(pair: PairAccuracy) -> str:
    return sides_label(pair.train, pair.infer)


def tables(evaluation: Evaluation) -> Iterator[Table]:
    """Engines, what lies between them where there are several, and pairs."""
    columns: list[Column[EngineAccuracy]] = [
        Column("engine", lambda engine: side_label(engine.infer)),
        Column("accuracy (mu)", lambda engine: write_estimate(engine.accuracy)),
        Column("responses", lambda engine: write_count(engine.accuracy.num_sequences)),
        Column("truncated", lambda engine: write_count(engine.truncated_responses)),
    ]
    yield Table.of("Engines", evaluation.engines, columns)
    if evaluation.differences:
        yield _between(evaluation)
    yield pairs_table(evaluation)


def _between(evaluation: Evaluation) -> Table:
    columns: list[Column[EngineDifference]] = [
        Column("engines", lambda row: f"{side_label(row.of)} less {side_label(row.over)}"),
        Column("difference", lambda row: write_estimate(row.difference)),
        Column("what it says", lambda row: _reading_of_difference(row.difference), is_text=True),
    ]
    return Table.of("Between engines", evaluation.differences, columns)


def _reading_of_difference(difference: Estimate) -> str:
    """The honest reading of an interval."""
    if difference.low is None or difference.high is None:
        return "all responses earned the same, so they cannot show a difference"
    if difference.low <= 0 <= difference.high:
        return "no difference seen: the interval holds 0"
    return "the first is better" if difference.value > 0 else "the second is better"


def pairs_table(evaluation: Evaluation) -> Table:
    columns: list[Column[PairAccuracy]] = [
        Column("train", lambda pair: side_label(pair.train)),
        Column("infer", lambda pair: side_label(pair.infer), is_text=True),
        Column("under mu", lambda pair: write_estimate(pair.under_mu)),
        Column("under pi", lambda pair: write_estimate(pair.under_pi)),
        Column("gap", lambda pair: write_estimate(pair.gap)),
        Column("ESS", lambda pair: ABSENT if pair.ess is None else write_number(pair.ess.value)),
    ]
    if any(pair.direct is not None for pair in evaluation.pairs):
        columns += [
            Column("pi sampled", lambda pair: write_estimate(_sampled_accuracy(pair))),
            Column("gap sampled", lambda pair: write_estimate(_sampled_gap(pair))),
        ]
    return Table.of("Pairs", evaluation.pairs, columns, is_stacked=True)


_NAME_CHARACTERS = 24


class _Shown(NamedTuple):
    name: str
    read: Callable[[PairAccuracy], Estimate | None]
    style: PairStyle


def _sampled_accuracy(pair: PairAccuracy) -> Estimate | None:
    return None if pair.direct is None else pair.direct.accuracy


def _sampled_gap(pair: PairAccuracy) -> Estimate | None:
    return None if pair.direct is None else pair.direct.gap


_MU, _PI, _DIRECT = PairStyle("truncate", (), "o"), PairStyle("mask", (6, 2), "s"), PairStyle("fp32", (1.5, 1.5), "^")
_ACCURACIES: Final = (
    _Shown("under the engine (mu)", lambda pair: pair.under_mu, _MU),
    _Shown("under the training policy (pi), weighed", lambda pair: pair.under_pi, _PI),
    _Shown("under the training policy, sampled", _sampled_accuracy, _DIRECT),
)
_GAPS: Final = (
    _Shown("gap, weighed", lambda pair: pair.gap, _PI),
    _Shown("gap, sampled", _sampled_gap, _DIRECT),
)


def accuracy_figure(evaluation: Evaluation) -> Figure:
    """Both drawings; an estimate that the responses do not allow has no mark."""
    present = [accuracy for accuracy in _ACCURACIES if any(accuracy.read(pair) for pair in evaluation.pairs)]
    return Figure(
        "figure-accuracy",
        "How to read it: bars are intervals clustered by problem. Both accuracies are of the same responses, so the "
        "gap is known better than either; where its bar crosses the dotted line, no gap was seen.",
        [
            _evaluate_panel(
                evaluation,
                Heading(
                    "plot-accuracy",
                    "Accuracy",
                    _estimates_sentence(evaluation, _ACCURACIES),
                    "Mean reward of a response.",
                ),
                _ACCURACIES,
                "accuracy",
            ),
            _evaluate_panel(
                evaluation,
                Heading(
                    "plot-gap",
                    "What deployment loses",
                    _estimates_sentence(evaluation, _GAPS),
                    "Accuracy under the training policy less that under the engine; above 0 deployment loses.",
                ),
                _GAPS,
                "gap in accuracy",
                zero=True,
            ),
        ],
        [pairs_table(evaluation)],
        key=[(accuracy.name, accuracy.style) for accuracy in present],
    )


def _evaluate_panel(
    evaluation: Evaluation, heading: Heading, series: Sequence[_Shown], y_label: str, *, zero: bool = False
) -> Panel:
    names = [pair_name(pair) for pair in evaluation.pairs]
    present = [accuracy for accuracy in series if any(accuracy.read(pair) for pair in evaluation.pairs)]

    def on(figure: Drawing) -> None:
        for number, accuracy in enumerate(present):
            shift = 0.16 * (number - (len(present) - 1) / 2)
            places = [
                (place + shift, name, estimate)
                for place, (name, pair) in enumerate(zip(names, evaluation.pairs, strict=True))
                if (estimate := accuracy.read(pair)) is not None
            ]
            if places:
                estimates = [estimate for _, _, estimate in places]
                marks(
                    figure,
                    [place for place, _, _ in places],
                    [estimate.value for estimate in estimates],
                    accuracy.style,
                    [hover_estimate(name, accuracy.name, estimate) for _, name, estimate in places],
                    low=[estimate.low for estimate in estimates],
                    high=[estimate.high for estimate in estimates],
                )
        if not figure.traces:
            return
        ticks = [inert_text(cut_text(name, _NAME_CHARACTERS, keep="start")) for name in names]
        figure.update_axis("x", tickvals=list(range(len(names))), ticktext=ticks, range=[-0.6, len(names) - 0.4])
        figure.update_axis("y", title={"text": inert_text(y_label)})
        if zero:
            limit_line(figure, 0.0, role="reject")

    return panel(heading, on)


def _estimates_sentence(evaluation: Evaluation, series: Sequence[_Shown]) -> str:
    return "; ".join(
        f"{pair_name(pair)} {accuracy.name} {write_estimate(estimate)}"
        for pair in evaluation.pairs
        for accuracy in series
        if (estimate := accuracy.read(pair)) is not None
    )


def evaluation_answer(evaluation: Evaluation, summary: Summary | None = None) -> Answer:
    """Of an evaluation that is finished. summary: that of the comparison behind it, which a page names."""
    pair = worst(evaluation.pairs)
    answer = headline(evaluation.pairs)
    sentences = [text for each in evaluation.pairs if (text := f"{capital(sentence(each))}.") != answer]
    return Answer(
        subject="accuracy under both policies",
        model=evaluation.model,
        headline=answer,
        tiles=_evaluate_tiles(evaluation, pair),
        badge=badge(pair),
        facts=_evaluate_facts(evaluation),
        advice=advice(evaluation),
        table=pairs_table(evaluation),
        footnote="Brackets: intervals clustered by problem. Under pi: the engine's responses, each weighing pi/mu. "
        "ESS: the share of the responses that these weights leave.",
        figure=accuracy_figure(evaluation),
        sections=[] if summary is None else [_evaluate_section(evaluation, summary)],
        screen=[
            *(replace(table, caption="") for table in tables(evaluation)),
            *([Lines(sentences)] if sentences else []),
        ],
    )


def _evaluate_section(evaluation: Evaluation, summary: Summary) -> Section:
    """What each pair's numbers say, the engines, and where the log-probs themselves stand."""
    blocks: list[Block] = [
        Finding(f"accuracy-{number}", pair_name(pair), badge(pair), f"{capital(sentence(pair))}.", [])
        for number, pair in enumerate(evaluation.pairs, start=1)
    ]
    blocks += [table for table in tables(evaluation) if table.caption != "Pairs"]
    mismatch = Badge.of(summary.verdict)
    blocks.append(Finding("accuracy-mismatch", "The mismatch behind it", mismatch, short_answer(summary), []))
    return Section(
        "accuracy",
        "What the responses earned",
        f"Task {evaluation.task}. The sections below are those of a comparison: what the two sides' log-probs are.",
        blocks,
    )


def _evaluate_tiles(evaluation: Evaluation, pair: PairAccuracy) -> list[Tile]:
    engine = next(engine for engine in evaluation.engines if engine.infer == pair.infer)
    accuracy, cut_share = write_estimate(engine.accuracy), engine.truncated_responses / engine.accuracy.num_sequences
    tiles = [
        Tile(
            f"Accuracy of the engine in {side_label(pair.infer)}",
            accuracy.value,
            f"{accuracy.interval}; {write_percent(cut_share)} of the responses were cut",
        )
    ]
    if pair.gap is not None:
        is_gain = badge(pair).kind == "precision"
        gap = write_estimate(without_sign(pair.gap) if is_gain else pair.gap)
        note = "; ".join(part for part in (gap.interval, "0 is no gap") if part)
        tiles.append(
            Tile(f"{pair_name(pair)}: accuracy that deployment {'gains' if is_gain else 'loses'}", gap.value, note)
        )
    return [*tiles, Tile("Responses", write_count(engine.accuracy.num_sequences), _evaluate_problems(pair))]


def _evaluate_problems(pair: PairAccuracy) -> str:
    estimate = pair.under_mu
    if estimate is None or estimate.num_prompts is None:
        return "of each engine"
    return f"of each engine, to {write_many(estimate.num_prompts, 'problem')}"


def _evaluate_facts(evaluation: Evaluation) -> list[str]:
    sampling_words = (
        "pi sampled responses of its own" if evaluation.settings.sample_pi else "responses of the engines alone"
    )
    return [f"task {evaluation.task}", sampling_words]
