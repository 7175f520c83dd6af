"""`explain` on a page and on a screen: what explains each side of a log, and what was tried."""

from rich.console import Console

from mismatch_probe.notation import write_many, write_number, write_percent
from mismatch_probe.records.explanation import Explanation, SideExplanation, Trial
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.screen import print_advice, print_line, print_titled
from mismatch_probe.report.view import Badge, Block, Cell, Finding, Note, Overview, Section, Table

SIDES = {"mu": "sampler", "pi": "trainer"}
_MOST_TRIALS = 12


def explain_anchor(explanation: Explanation) -> str:
    return "explain" if explanation.step is None else f"explain-step-{explanation.step}"


def explain_title(explanation: Explanation) -> str:
    return "What explains the log" + ("" if explanation.step is None else f": step {explanation.step}")


def explain_overview(explanation: Explanation) -> Overview:
    return Overview(
        subject="what explains the log",
        model=explanation.settings.model.path,
        headline=explanation.verdict.sentence,
        badge=Badge.of(explanation.verdict),
        facts=[
            f"{write_many(explanation.num_tokens, 'token')} of {write_many(explanation.num_responses, 'response')}",
        ],
        advice=explanation.verdict.advice,
        table=_sides(explanation),
        footnote="Rounding: what the declared dtype alone leaves on tokens of like probability. Parameters were fitted "
        "on other tokens than they are judged on.",
        contrasts=[],
        figure=None,
    )


def explain_sections(explanation: Explanation) -> list[Section]:
    blocks: list[Block] = [_finding(explanation, side) for side in explanation.sides]
    for side in explanation.sides:
        blocks.append(_trials(side))
        if side.left_out:
            blocks.append(
                Note(
                    f"Not tried on the {SIDES[side.side]}'s side:",
                    [f"{what}: {why}" for what, why in side.left_out.items()],
                )
            )
    return [Section("tried", "What was tried", "Each row was computed from the checkpoint.", blocks)]


def render_explanation(explanation: Explanation, console: Console) -> None:
    """The verdict, each side's, and what was tried."""
    print_line(console, "")
    print_line(console, explanation.verdict.sentence, "bold")
    for line in explanation.verdict.evidence:
        print_line(console, f"  {line}")
    print_titled(console, _sides(explanation))
    for side in explanation.sides:
        print_titled(console, _trials(side))
    print_advice(console, explanation.verdict.advice)


def _sides(explanation: Explanation) -> Table:
    rows: list[list[Cell]] = [
        [
            SIDES[side.side],
            Badge.of(side.verdict),
            visible(_words(side.explained_by)),
            _floors(side.trials[0]) if side.trials else "",
            "" if side.explained_by is None else _floors(side.explained_by),
        ]
        for side in explanation.sides
    ]
    columns = ["side", "verdict", "explained by", "as declared leaves", "explained leaves"]
    return Table("Each side of the log", columns, rows, text_columns=frozenset({1, 2}), stacked=True)


def _finding(explanation: Explanation, side: SideExplanation) -> Finding:
    verdict = side.verdict
    lists = [("Evidence", verdict.evidence), ("Advice", verdict.advice)]
    return Finding(
        f"{explain_anchor(explanation)}-{side.side}",
        f"the {SIDES[side.side]}'s side",
        Badge.of(verdict),
        verdict.sentence,
        [(heading, items) for heading, items in lists if items],
    )


def _trials(side: SideExplanation) -> Table:
    rows: list[list[Cell]] = [
        [visible(_words(trial)), write_percent(trial.explained), _floors(trial), write_number(trial.residual_nats)]
        for trial in side.trials[:_MOST_TRIALS]
    ]
    columns = ["if", "explains of the square", "leaves", "leaves, nats"]
    return Table(f"Tried on the {SIDES[side.side]}'s side", columns, rows)


def _words(trial: Trial | None) -> str:
    if trial is None:
        return "nothing that was tried"
    return " and ".join(departure.what for departure in trial.departures) or "as declared"


def _floors(trial: Trial) -> str:
    return f"{write_number(trial.residual_floors)} × rounding"
