"""Deviation against how sure the model is of the token."""

from collections.abc import Sequence

from mismatch_probe.notation import write_count, write_estimate, write_number, write_range
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures import length as length_drawing
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    band,
    hover_estimate,
    line,
    logarithmic,
    panel,
    titles,
)
from mismatch_probe.report.names import DETAILED_PAIRS, MORE_PAIRS_NOTE, StyleOf, pair_key, pair_label, pair_styles
from mismatch_probe.report.view import Block, Cell, Drawing, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.stats.results import ConfidenceBin, ConfidenceCurve

_MEASURES = {
    "reference_probability": "reference probability",
    "inference_probability": "inference probability",
    "entropy_nats": "entropy",
}

Separated = list[tuple[PairSummary, list[ConfidenceCurve]]]
_BAND_ALPHA = 0.22


def confidence(summary: Summary) -> Section:
    shown = [pair for pair in summary.pairs if pair.confidence]
    blocks: list[Block] = [Note("No token was measured, so there are no bins.")]
    if shown:
        blocks = [_figure(shown, pair_styles(summary.pairs))]
    for by in _MEASURES:
        curves = [
            (pair, [curve for curve in pair.length.by_confidence if curve.by == by])
            for pair in summary.pairs[:DETAILED_PAIRS]
            if pair.length
        ]
        separated = [(pair, curve) for pair, curve in curves if curve]
        if separated:
            blocks.append(_by_position(by, separated))
    if len(summary.pairs) > DETAILED_PAIRS:
        blocks.append(Note(MORE_PAIRS_NOTE))
    return Section(
        "confidence",
        "Deviation against confidence",
        "Unlikely tokens deviate most. A curve against length can bend only because longer responses hold other "
        "tokens; inside a bin of confidence that explanation is gone.",
        blocks,
    )


def _figure(shown: list[PairSummary], style_of: StyleOf) -> Figure:
    heading = Heading(
        "confidence-mean",
        "Mean |d| by reference probability",
        "; ".join(
            f"{pair_label(pair)} goes from {write_estimate(pair.confidence[0].mean_abs_diff)} in the lowest bin to "
            f"{write_estimate(pair.confidence[-1].mean_abs_diff)} in the highest"
            for pair in shown
        ),
    )
    return Figure(
        "figure-confidence",
        "How to read it: lines are means with their interval. A fall to the right is what rounding of logits does; "
        "a level that does not fall at sure tokens is worth a look. Bins that tokens of fewer than "
        f"{length_drawing.FEWEST_RESPONSES} responses fall into are left to the table.",
        [_panel(heading, shown, style_of)],
        [_table(pair) for pair in shown[:DETAILED_PAIRS]],
        key=[(pair_label(pair), style_of(pair)) for pair in shown],
    )


def _by_position(by: str, separated: Separated) -> Figure:
    words = _MEASURES[by]
    panels, tables = [], []
    for pair, curves in separated:
        title = f"{pair_label(pair)}, by {words}"
        heading = Heading(
            f"confidence-{by}-{pair_key(pair)}", title, f"One line for each of {len(curves)} bins of {words}."
        )
        panels.append(length_drawing.draw_by_confidence(heading, curves))
        tables.append(_positions(title, curves))
    widest = max((curves for _, curves in separated), key=len)
    key = [(_range(curve), length_drawing.confidence_style(curve, widest)) for curve in widest]
    return Figure(
        f"figure-length-by-{by.replace('_', '-')}",
        "How to read it: mean |d| by position, one line for each bin of confidence. Where the lines are flat, "
        "length by itself does nothing; a line that rises means that position matters among equally hard tokens.",
        panels,
        tables,
        key=key,
        dense=True,
    )


def _positions(title: str, curves: Sequence[ConfidenceCurve]) -> Table:
    """Mean |d| of each stretch of positions, a column for each bin of confidence."""
    means = [{(bin_.low, write_range(bin_)): bin_.mean for bin_ in curve.abs_diff_by_position} for curve in curves]
    stretches = sorted({stretch for of_curve in means for stretch in of_curve})
    rows: list[list[Cell]] = [
        [stretch[1], *(write_estimate(of_curve.get(stretch)) for of_curve in means)] for stretch in stretches
    ]
    return Table(f"{title}: mean |d| by position", ["tokens", *map(_range, curves)], rows)


def _range(curve: ConfidenceCurve) -> str:
    return f"{_MEASURES[curve.by]} {curve.low:g} to {curve.high:g}"


def _table(pair: PairSummary) -> Table:
    rows: list[list[Cell]] = [
        [
            bin_label(bin_),
            write_count(bin_.num_tokens),
            write_estimate(bin_.mean_abs_diff),
            write_number(bin_.rms_error_pi),
            write_number(bin_.rms_error_mu),
        ]
        for bin_ in pair.confidence
    ]
    columns = ["reference probability", "tokens", "mean |d|", "rms of e_pi", "rms of e_mu"]
    return Table(f"{pair_label(pair)} by reference probability", columns, rows)


def _panel(heading: Heading, pairs: Sequence[PairSummary], style_of: StyleOf) -> Panel:
    """Mean abs(d) with its interval in bins of the reference probability, drawn equally wide."""
    edges = sorted({edge for pair in pairs for bin_ in pair.confidence for edge in (bin_.low, bin_.high)})

    def on(figure: Drawing) -> None:
        titles(figure, "reference probability of the sampled token", "mean |d|, nats")
        for pair in pairs:
            bins = [bin_ for bin_ in _solid(pair) if bin_.mean_abs_diff.value > 0]
            x = [float(edges.index(bin_.low)) for bin_ in bins]
            low, high = ([getattr(bin_.mean_abs_diff, end) for bin_ in bins] for end in ("low", "high"))
            style, name = style_of(pair), pair_label(pair)
            band(figure, x, low, high, style, _BAND_ALPHA)
            texts = [hover_estimate(name, bin_label(bin_), bin_.mean_abs_diff, "nats") for bin_ in bins]
            line(figure, x, [bin_.mean_abs_diff.value for bin_ in bins], style, texts)
        if not figure.traces:
            return
        figure.update_axis(
            "x",
            tickvals=[number - 0.5 for number in range(len(edges))],
            ticktext=[f"{edge:g}" for edge in edges],
            tickangle=-40,
        )
        logarithmic(figure, "y", [bin_.mean_abs_diff.value for pair in pairs for bin_ in _solid(pair)], LEAST_SPAN)

    return panel(heading, on)


def _solid(pair: PairSummary) -> list[ConfidenceBin]:
    """The bins that tokens of enough responses fall into for a point to mean something."""
    return [bin_ for bin_ in pair.confidence if bin_.mean_abs_diff.num_sequences >= length_drawing.FEWEST_RESPONSES]


def bin_label(bin_: ConfidenceBin) -> str:
    return f"{bin_.low:g} to {bin_.high:g}"
