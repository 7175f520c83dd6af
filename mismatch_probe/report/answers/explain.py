"""`explain`: what explains each side of a log, and what was tried."""

from mismatch_probe.notation import write_many, write_number, write_percent
from mismatch_probe.records.findings import Explanation, SideExplanation, Trial
from mismatch_probe.report.names import visible
from mismatch_probe.report.view import Answer, Badge, Block, Cell, Column, Finding, Lines, Note, Section, Table

SIDES = {"mu": "sampler", "pi": "trainer"}
_MOST_TRIALS = 12


def explain_anchor(explanation: Explanation) -> str:
    return "explain" if explanation.step is None else f"explain-step-{explanation.step}"


def explain_title(explanation: Explanation) -> str:
    return "What explains the log" + ("" if explanation.step is None else f": step {explanation.step}")


def explain_answer(explanation: Explanation) -> Answer:
    return Answer(
        subject="what explains the log",
        model=explanation.settings.model.path,
        headline=explanation.verdict.sentence,
        badge=Badge.of(explanation.verdict),
        facts=[
            f"{write_many(explanation.num_tokens, 'token')} of {write_many(explanation.num_responses, 'response')}",
        ],
        advice=explanation.verdict.advice,
        table=_sides_of_log(explanation),
        footnote="Rounding: what the declared dtype alone leaves on tokens of like probability. Parameters were fitted "
        "on other tokens than they are judged on.",
        sections=_explain_sections(explanation),
        screen=[
            Lines([f"  {line}" for line in explanation.verdict.evidence], follows=True),
            _sides_of_log(explanation),
            *map(_trials, explanation.sides),
        ],
    )


def _explain_sections(explanation: Explanation) -> list[Section]:
    blocks: list[Block] = [_side_finding(explanation, side) for side in explanation.sides]
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


def _sides_of_log(explanation: Explanation) -> Table:
    columns: list[Column[SideExplanation]] = [
        Column("side", lambda side: SIDES[side.side]),
        Column("verdict", lambda side: Badge.of(side.verdict), is_text=True),
        Column("explained by", lambda side: visible(_trial_words(side.explained_by)), is_text=True),
        Column("as declared leaves", lambda side: _floors(side.trials[0]) if side.trials else ""),
        Column("explained leaves", lambda side: "" if side.explained_by is None else _floors(side.explained_by)),
    ]
    return Table.of("Each side of the log", explanation.sides, columns, is_stacked=True)


def _side_finding(explanation: Explanation, side: SideExplanation) -> Finding:
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
    columns: list[Column[Trial]] = [
        Column("if", lambda trial: visible(_trial_words(trial))),
        Column("explains of the square", _explained_share),
        Column("leaves", _floors),
        Column("leaves, nats", lambda trial: write_number(trial.residual_nats)),
    ]
    return Table.of(f"Tried on the {SIDES[side.side]}'s side", side.trials[:_MOST_TRIALS], columns)


def _explained_share(trial: Trial) -> Cell:
    """A hypothesis that leaves more than is declared explains nothing."""
    return write_percent(trial.explained) if trial.explained > 0 else "nothing"


def _trial_words(trial: Trial | None) -> str:
    if trial is None:
        return "nothing that was tried"
    return " and ".join(departure.what for departure in trial.departures) or "as declared"


def _floors(trial: Trial) -> str:
    return f"{write_number(trial.residual_floors)} × rounding"
