"""The metrics of logged responses over the steps of training."""

from collections.abc import Sequence

from mismatch_probe.notation import ABSENT, write_count, write_estimate
from mismatch_probe.records.summary import PairSummary, StepSummary, Summary
from mismatch_probe.report.figures import series as drawing
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import PairStyle, pair_key, pair_label, pair_styles
from mismatch_probe.report.view import Block, Cell, Figure, Heading, Section, Table

_COLUMNS = {
    "abs_logprob_diff": "mean |d|",
    "kl_k3": "KL (k3)",
    "is_ratio_mean_token": "mean ratio",
    "outside_band_0.8_1.25": "tokens outside [0.8, 1.25]",
    "ess_seq": "ESS of responses",
}


def steps(summary: Summary) -> Section | None:
    """None where no pair has responses of several steps or weight versions."""
    shown = [pair for pair in summary.pairs if pair.steps]
    if not shown:
        return None
    has_steps = any(row.step is not None for pair in shown for row in pair.steps)
    return Section(
        "steps",
        "Over the steps of training",
        "Each row is one step and one version of the weights that sampled. Where a step has several versions, what "
        "grows from the newest to the oldest is staleness; what the newest shows is not. Of very many steps, stretches "
        "of neighbouring ones have a row each.",
        [*([_figure(summary, shown)] if has_steps else []), *(_table(pair) for pair in shown)],
    )


def _figure(summary: Summary, pairs: Sequence[PairSummary]) -> Block:
    style_of = pair_styles(summary.pairs)
    panels = [
        drawing.draw(
            Heading(
                f"steps-{name.replace('_', '-')}",
                title,
                f"{title} over the steps of training",
                "A level that stays is numerics; a rise between two steps marks what changed there.",
            ),
            [_curve(pair, name, style_of(pair)) for pair in pairs],
            "step",
            unit,
        )
        for name, title, unit in (("abs_logprob_diff", "Mean |d|", "nats"), ("kl_k3", "KL (k3)", "nats a token"))
    ]
    key = [(pair_label(pair), style_of(pair)) for pair in pairs]
    return Figure("figure-steps", "Lines are estimates, the band is their interval.", panels, [], key=key)


def _curve(pair: PairSummary, name: str, style: PairStyle) -> drawing.Series:
    """Of each step the newest version, the last in its order, so that staleness does not move the line."""
    newest: dict[int, StepSummary] = {row.step: row for row in pair.steps if row.step is not None}
    rows = [row for row in newest.values() if name in row.metrics]
    estimates = [row.metrics[name] for row in rows]
    return drawing.Series(
        pair_label(pair),
        [float(row.step or 0) for row in rows],
        [estimate.value for estimate in estimates],
        style,
        [estimate.low for estimate in estimates],
        [estimate.high for estimate in estimates],
    )


def _steps_of(row: StepSummary) -> str:
    if row.step is None:
        return ABSENT
    return str(row.step) if row.last_step is None else f"{row.step} to {row.last_step}"


def _table(pair: PairSummary) -> Table:
    rows: list[list[Cell]] = []
    for row in pair.steps:
        first = next(iter(row.metrics.values()), None)
        rows.append(
            [
                _steps_of(row),
                ABSENT if row.weight_version is None else visible(row.weight_version),
                ABSENT if first is None else write_count(first.num_sequences),
                ABSENT if first is None else write_count(first.num_tokens),
                *(write_estimate(row.metrics[name]) if name in row.metrics else ABSENT for name in _COLUMNS),
            ]
        )
    return Table(
        f"{pair_label(pair)}: each step",
        ["step", "weights", "responses", "tokens", *_COLUMNS.values()],
        rows,
        text_columns=frozenset({1}),
        folded=len(rows) > 12,
        anchor=f"steps-{pair_key(pair)}",
    )
