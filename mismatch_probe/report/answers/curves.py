"""`import` of metrics alone: what each curve is called here, what it does, what it means, and what it cannot tell."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from mismatch_probe.notation import ABSENT, join_names, write_count, write_many, write_number
from mismatch_probe.records.lines import Contradiction, CurveReading, MetricCurve, PublishedBand
from mismatch_probe.report.figures.over_steps import AxisScale, Curve, draw
from mismatch_probe.report.names import PairStyle, visible
from mismatch_probe.report.view import (
    Answer,
    Badge,
    Block,
    Column,
    Figure,
    Finding,
    Heading,
    Lines,
    Note,
    Panel,
    Section,
    Table,
    Terms,
)
from mismatch_probe.stats.catalogue import METRICS

_STYLE: Final = PairStyle("bf16", (), "o")
_MOST_PANELS: Final = 6
_HEIGHT: Final = 260
_BADGES: Final = {
    "growing": Badge("growing", "grows"),
    "step_up": Badge("growing", "steps up"),
    "sawtooth": Badge("undecided", "sawtooth"),
    "flat": Badge("undecided", "flat"),
    "unsure": Badge("undecided", "no sure trend"),
    "falling": Badge("undecided", "falls"),
    "step_down": Badge("undecided", "steps down"),
}
_HANGS_ON: Final = ("entropy", "staleness", "staleness_max")
_ORDER_OF_CAUSES: Final = (
    "All fit the shape of the curve. Where another metric speaks for a cause or against it, the cause comes first or "
    "last and says so; the others have no order."
)
_LINEAR: Final = ("prob_pearson", "token_mult_prob_error", "entropy", "staleness", "staleness_max")


def curves_answer(reading: CurveReading) -> Answer:
    """The headline curve, contradictions, names, bands, causes, what metrics cannot answer and what to log next."""
    foremost = next(curve for curve in reading.curves if curve.name == reading.headline_curve)
    badge = _BADGES.get(foremost.shape, Badge("undecided", "metrics alone"))
    if reading.verdict.kind == "broken":
        badge = Badge("broken", "contradiction")
    bands = [(curve, band) for curve in reading.curves for band in curve.bands]
    next_columns = [
        (f"{column.name}: {column.shows}" + (f" ({column.how})" if column.how else ""))
        for column in reading.next_columns
    ]
    return Answer(
        subject="metrics of a training run",
        model=reading.source,
        headline=reading.verdict.sentence,
        badge=badge,
        facts=[
            f"{reading.kind} with metrics of {join_names(reading.trainers)}",
            f"{write_many(reading.num_steps, 'step')}, {reading.first_step} to {reading.last_step}",
            "metrics alone, no token",
        ],
        advice=[f"Log {sentence}" for sentence in next_columns],
        table=_curves_table(reading.curves, "under Names and sources"),
        footnote="Levels are those of the step or the line that fits the curve best, at its first and its last step; "
        "of a flat curve its median. A level changes surely by a test at 0.1 %, or where all values of one end lie "
        "threefold beyond all of the other half; a change below 1.5-fold is flat, and one of twofold that is not sure "
        "has no sure trend. A level within a tenth of a published number is within it: these are rounded. A limit "
        "is strict.",
        figure=_figure(reading.curves),
        sections=list(_sections(reading, bands)),
        screen=[
            *_contradiction_lines(reading.contradictions),
            _curves_table(reading.curves, "on the page, under Names and sources"),
            *_bands_on_screen(foremost),
            *(
                [
                    Lines(["Causes that fit"], "bold"),
                    Lines([f"  {cause}" for cause in reading.causes], follows=True),
                    Lines([_ORDER_OF_CAUSES], "dim", follows=True),
                ]
                if reading.causes
                else []
            ),
            Lines(["What metrics alone cannot answer"], "bold"),
            Lines([f"  {what}" for what in reading.open_questions], follows=True),
            *_reading_notes(reading),
        ],
    )


def _contradiction_lines(contradictions: Sequence[Contradiction]) -> Iterator[Lines | Terms]:
    if contradictions:
        yield Lines(["What contradicts what"], "bold")
        yield Lines(
            [
                line
                for contradiction in contradictions
                for line in (f"  {contradiction.sentence}.", f"    {contradiction.means}")
            ],
            follows=True,
        )


def _reading_notes(reading: CurveReading) -> Iterator[Lines]:
    lines = [f"note: {note}" for note in reading.notes]
    if reading.num_unknown:
        are = "is" if reading.num_unknown == 1 else "are"
        lines.append(f"note: {write_many(reading.num_unknown, 'other metric')} of the log {are} not read")
    if lines:
        yield Lines(lines, "dim")


def _curves_table(curves: Sequence[MetricCurve], where_all_are: str) -> Table:
    """Those that measure the mismatch, and what it hangs on; the table of names has all."""
    of_mismatch = [curve for curve in curves if curve.shape != "other" or curve.metric in _HANGS_ON]
    columns: list[Column[MetricCurve]] = [
        Column("metric", _short_words, is_text=True),
        Column("level", _level_of_curve),
        Column("shape", lambda curve: curve.shape_words or ABSENT, is_text=True),
        Column("logged as", lambda curve: visible(curve.name), is_text=True),
    ]
    more = (
        f" ({write_count(len(curves) - len(of_mismatch))} more {where_all_are})"
        if len(of_mismatch) < len(curves)
        else ""
    )
    return Table.of(f"Curves{more}", of_mismatch or curves, columns, is_stacked=True)


def _short_words(curve: MetricCurve) -> str:
    facts = METRICS.get(curve.metric)
    return facts.short or facts.words if facts is not None else curve.words


def _level_of_curve(curve: MetricCurve) -> str:
    first, last = write_number(curve.first_level), write_number(curve.last_level)
    return last if curve.first_level == curve.last_level else f"{first} → {last}"


def _bands_on_screen(curve: MetricCurve) -> Iterator[Table]:
    """Those of the headline's curve; the page has all."""
    if curve.bands:
        columns: list[Column[PublishedBand]] = [
            Column("which is", lambda band: band.relation, is_text=True),
            Column("published", _band_range),
            Column("of", lambda band: band.words, is_text=True),
            Column("source", lambda band: band.source, is_text=True),
        ]
        level = f"{curve.words} is {write_number(curve.last_level)}"
        yield Table.of(f"Compared with published numbers: {level}", curve.bands, columns)


def _bands_table(bands: Sequence[tuple[MetricCurve, PublishedBand]]) -> Table:
    columns: list[Column[tuple[MetricCurve, PublishedBand]]] = [
        Column("metric", lambda row: row[0].words, is_text=True),
        Column("is", lambda row: write_number(row[0].last_level)),
        Column("which is", lambda row: row[1].relation, is_text=True),
        Column("published", lambda row: _band_range(row[1])),
        Column("of", lambda row: row[1].words, is_text=True),
        Column("source", lambda row: row[1].source, is_text=True),
    ]
    return Table.of("Compared with published numbers", bands, columns, is_stacked=True)


def _band_range(band: PublishedBand) -> str:
    low, high = (None if bound is None else _short(bound) for bound in (band.low, band.high))
    if low is None or high is None:
        return f"at most {high}" if low is None else f"at least {low}"
    return low if low == high else f"{low} to {high}"


def _short(bound: float) -> str:
    """As it is published, without the zeros that fill three digits."""
    return re.sub(r"(?<=\.)(\d*?)0+(?=e|$)", r"\1", write_number(bound)).replace(".e", "e").rstrip(".")


def _sections(reading: CurveReading, bands: Sequence[tuple[MetricCurve, PublishedBand]]) -> Iterator[Section]:
    if reading.contradictions:
        blocks: list[Block] = [_finding(number, item) for number, item in enumerate(reading.contradictions)]
        yield Section("contradictions", "What contradicts what", "Laws that hold whatever the policies are.", blocks)
    if bands:
        yield Section(
            "bands",
            "Compared with published numbers",
            "Metrics alone do not say whether the model is dense or a mixture of experts: both stand here.",
            [_bands_table(bands)],
        )
    if reading.causes:
        blocks = [Note(f"{_ORDER_OF_CAUSES} A name in brackets is a cause in docs/causes.md.", reading.causes)]
        yield Section("causes", "Causes that fit", "", blocks)
    yield Section(
        "open_questions",
        "What metrics alone cannot answer",
        "",
        [Note("For these take a log of tokens:", reading.open_questions)],
    )
    yield Section(
        "names", "Names and sources", "", [_names_table(reading.curves), *_files_read(reading)], is_folded=True
    )


def _finding(number: int, contradiction: Contradiction) -> Finding:
    badge = Badge("broken", "contradiction") if contradiction.is_exact else Badge("undecided", "void")
    return Finding(
        f"contradiction-{number}",
        _law_words(contradiction),
        badge,
        f"{contradiction.sentence}.",
        [("What it means", [contradiction.means]), ("Read", [visible(name) for name in contradiction.curves])],
    )


def _law_words(contradiction: Contradiction) -> str:
    """What the sentence is about, up to its first number: `chi-squared of responses`."""
    return contradiction.sentence.split(" is ")[0]


def _names_table(curves: Sequence[MetricCurve]) -> Table:
    columns: list[Column[MetricCurve]] = [
        Column("their name", lambda curve: visible(curve.name), is_text=True),
        Column("trainer", lambda curve: curve.trainer, is_text=True),
        Column("here", lambda curve: curve.words, is_text=True),
        Column("level", _level_of_curve),
        Column("how it differs", lambda curve: curve.note or "as ours", is_text=True),
        Column("computed in", lambda curve: curve.source, is_text=True),
    ]
    return Table.of("Whose metric, and which of ours", curves, columns, is_stacked=True)


def _files_read(reading: CurveReading) -> Iterator[Note]:
    yield Note("Read:", reading.files)
    if reading.unknown:
        yield Note(f"{write_many(reading.num_unknown, 'name')} of the log not read, among them:", reading.unknown)
    if reading.notes:
        yield Note("Noted while reading:", reading.notes)


def _figure(curves: Sequence[MetricCurve]) -> Figure:
    panels = [_panel(number, curve) for number, curve in enumerate(curves[:_MOST_PANELS])]
    return Figure(
        "curves",
        "Lines are running means of what the trainer logged, the bands around them its range.",
        panels,
        [],
        dense=len(panels) > 2,
    )


def _panel(number: int, curve: MetricCurve) -> Panel:
    values = np.array([np.nan if value is None else value for value in curve.values])
    line = Curve(curve.name, np.array(curve.steps, dtype=float), values, _STYLE)
    heading = Heading(f"curve-{number}", curve.words, f"{curve.words} over the steps: {curve.shape_words}", curve.name)
    is_positive = bool((values[np.isfinite(values)] > 0).any())
    scale: AxisScale = "log" if curve.metric not in _LINEAR and is_positive else "linear"
    return draw(heading, [line], [], "value", scale, max(1, int(curve.steps[-1])), _HEIGHT)
