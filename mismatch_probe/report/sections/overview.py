"""The figure at the top of the page: how far apart the sides of each pair are, and how it adds up."""

import math
from collections.abc import Sequence

from mismatch_probe.notation import write_estimate
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures.canvas import (
    WIDE,
    color,
    dashes,
    hover_estimate,
    inert_text,
    limit_line,
    logarithmic,
    panel,
    symbol,
)
from mismatch_probe.report.figures.limits import Marks
from mismatch_probe.report.names import PairStyle, StyleOf, pair_label, pair_styles
from mismatch_probe.report.sections.length import draw_cumulative, drift_sentence
from mismatch_probe.report.sections.steps import draw_over_steps
from mismatch_probe.report.view import Column, Drawing, Figure, Heading, Panel, Table
from mismatch_probe.stats.catalogue import metric_words
from mismatch_probe.stats.results import Estimate, StepGrowth
from mismatch_probe.verdict.headline import KL_LIMIT, KL_LIMIT_NAME, foremost, grows

_ROW, _FRAME = 62, 90
"""Pixels of a pair's row, and of what is around the rows."""
_LABEL_CHARACTERS = 50
"""A phone cuts what is longer; then the interval stands in the table alone."""
_ROOM = 6.0
_TOP = -0.75
"""Of the axis of rows."""


def overview_figure(summary: Summary) -> Figure:
    """KL per token and log importance weight of each pair."""
    style_of = pair_styles(summary.pairs)
    pairs_drawn = [
        (pair, pair.length) for pair in summary.pairs if pair.length and pair.length.cumulative_diff_by_position
    ]
    kl = "; ".join(f"{pair_label(pair)} {write_estimate(pair.metrics.get('kl_k3'))}" for pair in summary.pairs)
    first = foremost(summary.pairs)
    over_all = ", over all steps" if grows(first) else ""
    heading = Heading(
        "overview-kl",
        f"How far apart: KL per token{over_all}",
        kl,
        "Each mark at the end of a thin line is the KL of a pair, the thick bar through it the interval of that KL, "
        "which may be narrower than the mark. The dotted line is "
        f"{KL_LIMIT_NAME}, a KL of {KL_LIMIT:g} a token.",
        "The axis is logarithmic: equal steps are equal factors.",
    )
    panels = [_estimates_panel(heading, summary.pairs, "kl_k3", style_of)]
    if first.growth is not None and grows(first):
        panels.insert(0, _over_steps(first.growth, [pair for pair in summary.pairs if pair.steps], style_of))
    elif pairs_drawn:
        heading = Heading(
            "overview-cumulative",
            "How it adds up: log importance weight",
            drift_sentence(pairs_drawn),
            "Mean of S, the sum of d up to each position; the thin straight line is the fitted drift. The farther from "
            "zero, the less the importance weight exp(S) of a whole response is worth.",
        )
        panels.append(draw_cumulative(heading, pairs_drawn, style_of))
    return Figure(
        "figure-overview",
        "How to read it: lower and flatter is better in both. Colour is the engine's side, dash and marker the "
        "training path's.",
        panels,
        [_kl_and_drift_table(summary)],
        key=[(pair_label(pair), style_of(pair)) for pair in summary.pairs],
    )


def _over_steps(growth: StepGrowth, pairs: Sequence[PairSummary], style_of: StyleOf) -> Panel:
    places = [] if growth.steepest_step is None else [growth.steepest_step]
    marks = Marks(limit=(KL_LIMIT, f"{KL_LIMIT_NAME} {KL_LIMIT:g}"), places=places)
    return draw_over_steps("overview-steps", "kl_k3", pairs, style_of, marks)


def _kl_and_drift_table(summary: Summary) -> Table:
    columns: list[Column[PairSummary]] = [
        Column("pair", pair_label),
        Column("KL (k3) per token", lambda pair: write_estimate(pair.metrics.get("kl_k3"))),
        Column(
            "drift of S per 1,000 tokens",
            lambda pair: write_estimate(pair.length.drift_per_1000 if pair.length else None),
        ),
        Column("KL (k1) per response", lambda pair: write_estimate(pair.metrics.get("kl_k1_seq"))),
    ]
    return Table.of("KL and drift of each pair, nats", summary.pairs, columns, is_stacked=True)


def _estimates_panel(heading: Heading, pairs: Sequence[PairSummary], metric: str, style_of: StyleOf) -> Panel:
    """Pairs without a positive value of `metric` get their label and no mark."""
    estimates = [(pair, pair.metrics[metric]) for pair in pairs if metric in pair.metrics]

    def on(figure: Drawing) -> None:
        if not estimates:
            return
        bounds = [bound for _, estimate in estimates for bound in (estimate.value, estimate.low, estimate.high)]
        numbers = [KL_LIMIT, *(bound for bound in bounds if bound is not None and bound > 0)]
        least, most = min(numbers) / _ROOM, max(numbers) * _ROOM
        logarithmic(figure, "x", [least, most])
        figure.fit_axis("x", [math.log10(least), math.log10(most)])
        figure.update_axis("x", title={"text": f"{metric_words(metric)}, nats per token"})
        figure.update_axis(
            "y", range=[len(estimates) - 0.4, _TOP], showticklabels=False, showgrid=False, fixedrange=True
        )
        limit_line(figure, KL_LIMIT, upright=True)
        _name_of_limit(figure, is_left_of_it=least * most < KL_LIMIT**2)
        for row, (pair, estimate) in enumerate(estimates):
            _interval_row(figure, row, pair, estimate, least, style_of(pair))

    return panel(heading, on, max(WIDE, _FRAME + _ROW * len(estimates)))


def _name_of_limit(figure: Drawing, *, is_left_of_it: bool) -> None:
    """Beside the line, whatever the scale."""
    figure.add_scatter(
        x=[KL_LIMIT],
        y=[_TOP],
        mode="text",
        text=[inert_text(f"\N{NO-BREAK SPACE}{KL_LIMIT_NAME} {KL_LIMIT:g}\N{NO-BREAK SPACE}")],
        textposition="bottom left" if is_left_of_it else "bottom right",
        textfont={"size": 11, "color": color("muted")},
        hoverinfo="skip",
    )


def _interval_row(
    figure: Drawing, row: int, pair: PairSummary, estimate: Estimate, least: float, style: PairStyle
) -> None:
    number = write_estimate(estimate)
    full = f"{pair_label(pair)}   {number}"
    label = inert_text(full if len(full) <= _LABEL_CHARACTERS else f"{pair_label(pair)}   {number.value}")
    figure.add_annotation(
        text=label,
        x=0,
        xref="paper",
        y=row - 0.32,
        showarrow=False,
        xanchor="left",
        font={"size": 12, "color": color("ink")},
        bgcolor="var(--page)",
        name=style.group,
    )
    if estimate.high is not None and estimate.high > 0:
        low = max(estimate.low or least, least)
        figure.add_scatter(
            x=[low, estimate.high],
            y=[row, row],
            mode="lines",
            line={"color": color(style.color), "width": 3},
            legendgroup=style.group,
            hoverinfo="skip",
        )
    value = estimate.value if estimate.value > 0 else None
    figure.add_scatter(
        x=[least, value],
        y=[row, row],
        mode="lines+markers",
        line={"color": color(style.color), "width": 1, "dash": dashes(style.dash)},
        marker={"symbol": symbol(style.marker), "size": [0, 10], "line": {"width": 0}},
        legendgroup=style.group,
        meta={"begins_at_edge": True},
        hovertext=["", hover_estimate(pair_label(pair), "", estimate, "nats per token")],
        hoverinfo="text",
    )
