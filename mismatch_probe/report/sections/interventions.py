"""What higher precision of each part, or another way to run the engine, would remove of the mismatch."""

from collections.abc import Sequence
from dataclasses import replace

from mismatch_probe.notation import ABSENT, WrittenNumber, write_percent, write_size
from mismatch_probe.records.findings import Intervention, Interventions, Localization
from mismatch_probe.report.figures.canvas import WIDE, color, hover, inert_text, marks, panel
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Block, Column, Drawing, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.stats.results import Estimate

_SIDES = {"infer": "engine", "train": "training path", "both": "both sides"}
_STYLES = {
    "infer": PairStyle("truncate", (), "o"),
    "train": PairStyle("mask", (6, 2), "s"),
    "both": PairStyle("fp32", (1.5, 1.5), "^"),
}
_DRAWN = 10
_ROW, _FRAME = 44, 70
"""Pixels of a row, and of what is around the rows."""


def best_part(localization: Localization) -> list[str]:
    """What the foremost intervention removes, where it surely removes anything; it was measured, not promised."""
    best = surely_best(localization)
    if best is None:
        return []
    return [
        f"Measured: {best.part} in higher precision on {whose(best)} removes {write_removed(best.removed)} of the "
        f"token KL and takes {_time_in_words(best)}."
    ]


def surely_best(localization: Localization) -> Intervention | None:
    """The foremost one whose interval leaves 0 out."""
    trials = [] if localization.interventions is None else localization.interventions.ranked
    return next((trial for trial in trials if trial.removed.low is not None and trial.removed.low > 0), None)


def interventions(findings: Interventions, key: str) -> Section:
    blocks: list[Block] = []
    if findings.ranked:
        blocks.append(_intervention_figure(findings, key))
    if sentence := together_sentence(findings):
        blocks.append(Note(f"Do the effects add up? {sentence}"))
    if findings.left_out:
        blocks.append(Note("Not tried:", [f"{what}: {why}" for what, why in findings.left_out.items()]))
    return Section(
        f"interventions-{key}",
        "What would fix it",
        "Each part in turn computes in FP32, everything else as it was, and the same token ids are scored again.",
        blocks,
    )


def together_sentence(findings: Interventions) -> str:
    """Empty where they were not tried together."""
    if findings.together is None or findings.sum_of_removed is None:
        return ""
    share, total = findings.together.removed, findings.sum_of_removed
    if share.value < 0 and share.low is not None and share.high is not None:
        mirror_image = replace(share, value=-share.value, low=-share.high, high=-share.low)
        together = f"added {write_removed(mirror_image)} to the KL"
    else:
        together = f"removed {write_removed(share)} of the KL"
    one_by_one = f"{'added' if total < 0 else 'removed'} {write_percent(abs(total))} in all"
    return f"All parts of the training path together {together}; one by one, they {one_by_one}."


def write_removed(share: Estimate) -> str:
    """`41 % (38 to 44)`; alone where no response moved."""
    if share.low is None or share.high is None or share.low == share.high:
        return write_percent(share.value)
    return f"{write_percent(share.value)} ({100 * share.low:.0f} to {100 * share.high:.0f})"


def _intervention_figure(findings: Interventions, key: str) -> Figure:
    drawn_trials = findings.ranked[:_DRAWN]
    best = drawn_trials[0]
    heading = Heading(
        f"plot-interventions-{key}",
        "Share of the token KL that each part removes",
        f"foremost {best.part} on {whose(best)}: {write_removed(best.removed)}",
    )
    more = f" The first {_DRAWN} of {len(findings.ranked)} are drawn." if len(findings.ranked) > _DRAWN else ""
    rows = [
        (f"{trial.part}: {write_removed(trial.removed)}", trial.removed, _STYLES[trial.side]) for trial in drawn_trials
    ]
    sides = dict.fromkeys(trial.side for trial in drawn_trials)
    return Figure(
        f"figure-interventions-{key}",
        "How to read it: farther right removes more of the mismatch; bars are intervals clustered by prompt, paired on "
        f"the same tokens. A bar across 0 removes nothing for sure.{more}",
        [_intervention_panel(heading, rows)],
        [tried_table(findings)],
        key=[(_SIDES[side], _STYLES[side]) for side in sides],
    )


def tried_table(findings: Interventions) -> Table:
    columns: list[Column[Intervention]] = [
        Column("in FP32, or otherwise", lambda trial: trial.part),
        Column("side", lambda trial: _SIDES[trial.side], is_text=True),
        Column("removes of KL", lambda trial: _removed_share(trial.removed)),
        Column("time", _time),
        Column("weights besides", lambda trial: _write_weights(trial.extra_bytes)),
    ]
    all_trials = [*findings.ranked, *([] if findings.together is None else [findings.together])]
    return Table.of("Every part that was tried", all_trials, columns, is_stacked=True)


def _removed_share(share: Estimate) -> WrittenNumber:
    value, _, interval = write_removed(share).partition(" (")
    return WrittenNumber(value, f"({interval}" if interval else "")


def whose(intervention: Intervention) -> str:
    return _SIDES[intervention.side] if intervention.side == "both" else f"the {_SIDES[intervention.side]}"


def _time(intervention: Intervention) -> str:
    return f"{round(100 * intervention.slower):+d} %"


def _time_in_words(intervention: Intervention) -> str:
    percent = round(100 * intervention.slower)
    if not percent:
        return "as long as before"
    return f"{abs(percent)} % {'more' if percent > 0 else 'less'} time"


def _write_weights(num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return write_size(num_bytes)
    return "under 1 MiB" if num_bytes else ABSENT


def _intervention_panel(heading: Heading, rows: Sequence[tuple[str, Estimate, PairStyle]]) -> Panel:
    """A label, a share of 1 with its interval, and whose it is, in each row."""

    def on(figure: Drawing) -> None:
        figure.update_axis("y", range=[len(rows) - 0.4, -0.75], showticklabels=False, showgrid=False, fixedrange=True)
        figure.update_axis(
            "x", title={"text": "share of the token KL that it removes"}, tickformat=".0%", zeroline=True
        )
        figure.update_axis("x", zerolinecolor=color("muted"))
        for row, (label, share, style) in enumerate(rows):
            figure.add_annotation(
                text=inert_text(label),
                x=0.01,
                xref="paper",
                y=row - 0.32,
                showarrow=False,
                xanchor="left",
                font={"size": 11, "color": color("ink")},
            )
            if share.low is not None and share.high is not None:
                figure.add_scatter(
                    x=[share.low, share.high],
                    y=[row, row],
                    mode="lines",
                    line={"color": color(style.color), "width": 3},
                    opacity=0.6,
                    legendgroup=style.group,
                    hoverinfo="skip",
                )
            marks(figure, [share.value], [row], style, [hover(label, _interval(share))])

    return panel(heading, on, max(WIDE, _FRAME + _ROW * len(rows)))


def _interval(share: Estimate) -> str:
    if share.low is None or share.high is None:
        return write_percent(share.value)
    return f"{write_percent(share.low)} to {write_percent(share.high)}"
