"""`explain`: what explains each side of a log, and what was tried."""

from typing import Final

from mismatch_probe.notation import ABSENT, write_count, write_many, write_number, write_percent
from mismatch_probe.records.findings import (
    ExpertAgreement,
    Explanation,
    PartsOfResponse,
    PartsReading,
    SideExplanation,
    Trial,
)
from mismatch_probe.report.names import visible
from mismatch_probe.report.view import Answer, Badge, Block, Cell, Column, Finding, Lines, Note, Section, Table

SIDES = {"mu": "engine", "pi": "training path"}
_MOST_TRIALS = 12


def explain_anchor(explanation: Explanation) -> str:
    return "explain" if explanation.step is None else f"explain-step-{explanation.step}"


def explain_title(explanation: Explanation) -> str:
    return "What explains the log" + ("" if explanation.step is None else f": step {explanation.step}")


_HOW_TO_READ_TRIALS: Final = [
    "explains: which share of the mean square (nats) that is left as declared a row takes away",
    "leaves: how many times what rounding leaves on tokens of the probability that the row gives them (rms)",
    "both leave out the largest hundredth of the tokens, and the nats count all: they do not follow from each other",
]


def explain_answer(explanation: Explanation) -> Answer:
    return Answer(
        subject="what explains the log",
        model=explanation.settings.model.path,
        headline=explanation.verdict.sentence,
        badge=Badge.of(explanation.verdict),
        facts=[
            f"{write_many(explanation.num_tokens, 'token')} of {write_many(explanation.num_responses, 'response')}",
            *([] if explanation.experts is None else [experts_sentence(explanation.experts)]),
            *([] if explanation.parts is None else [parts_fact(explanation.parts)]),
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
            Lines(_HOW_TO_READ_TRIALS, "dim", follows=True),
            *_parts_tables(explanation.parts),
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
    blocks.append(Note("How to read these tables:", _HOW_TO_READ_TRIALS))
    if explanation.experts is not None:
        blocks.append(_experts_by_layer(explanation.experts))
    blocks += _parts_tables(explanation.parts)
    return [Section("tried", "What was tried", "Each row was computed from the checkpoint.", blocks)]


def parts_fact(parts: PartsReading) -> str:
    """How many responses fit several versions, and how many records do not fit."""
    words = f"{write_count(parts.num_mixed)} of {write_many(parts.num_responses, 'response')} fit several versions"
    if not parts.num_recorded:
        return f"{words}; the log names no version"
    misfits = f"{write_count(parts.num_misfits)} of {write_count(parts.num_recorded)}"
    return f"{words}; the version that the log names does not fit {misfits}"


def _parts_tables(parts: PartsReading | None) -> list[Table]:
    """One table, none where no response has several versions or a record that does not fit."""
    if parts is None or not parts.responses:
        return []
    columns: list[Column[PartsOfResponse]] = [
        Column("response", lambda each: visible(each.where), is_text=True),
        Column("weights", _part_words, is_text=True),
        Column("recorded", lambda each: visible(each.recorded_version) or ABSENT, is_text=True),
        Column("record", _record_words, is_text=True),
    ]
    kept = ", behind the keys and values of the older ones" if parts.keeps_cache else ""
    return [Table.of(f"Weights within responses{kept}", parts.responses, columns, is_stacked=True)]


_RECORDS: Final = {
    "": "fits",
    "completion": "stamped at completion",
    "dispatch": "stamped at dispatch",
    "boundary": "changes at another token",
    "other": "other weights",
}


def _record_words(response: PartsOfResponse) -> str:
    return _RECORDS.get(response.misfit, response.misfit) if response.recorded_version else ABSENT


def _part_words(response: PartsOfResponse) -> str:
    """`7 up to token 12 (11 to 14), then 8`."""
    words = visible(response.parts[0].version)
    for number, part in enumerate(response.parts[1:]):
        start, last = response.intervals[number]
        words += f" up to token {response.parts[number].end} ({start} to {last}), then {visible(part.version)}"
    return words


def experts_sentence(experts: ExpertAgreement) -> str:
    """How far the experts of the log are those of the checkpoint, and which shift would make them so."""
    total = f"{write_many(experts.num_places, 'place')} (token and layer)"
    equal = f"the log's experts are the checkpoint's at {write_percent(experts.agreement)} of {total}"
    if experts.agreement_shifted is None:
        return equal
    shifts = (
        (experts.layer_shift, "layer", "behind", "before"),
        (experts.token_shift, "token", "late", "early"),
    )
    places = [
        f"{write_many(abs(by), what)} {deeper if by > 0 else before}" for by, what, deeper, before in shifts if by
    ]
    return (
        f"the log's experts stand {' and '.join(places)} of the checkpoint's: {write_percent(experts.agreement)} of "
        f"{total} are equal as they stand, {write_percent(experts.agreement_shifted)} with that undone"
    )


def _experts_by_layer(experts: ExpertAgreement) -> Table:
    columns: list[Column[tuple[str, float]]] = [
        Column("layer", lambda each: each[0]),
        Column("equal", lambda each: write_percent(each[1])),
    ]
    return Table.of(
        "Experts of the log that the checkpoint's routers take too", list(experts.by_layer.items()), columns
    )


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
        Column("explains", _explained_share),
        Column("leaves", _floors),
        Column("leaves, nats", lambda trial: write_number(trial.residual_nats)),
    ]
    return Table.of(
        f"Tried on the {SIDES[side.side]}'s side",
        side.trials[:_MOST_TRIALS],
        columns,
    )


def _explained_share(trial: Trial) -> Cell:
    """A hypothesis that leaves more than is declared explains nothing."""
    return write_percent(trial.explained) if trial.explained > 0 else "nothing"


def _trial_words(trial: Trial | None) -> str:
    if trial is None:
        return "nothing that was tried"
    return " and ".join(departure.what for departure in trial.departures) or "as declared"


def _floors(trial: Trial) -> str:
    return f"{write_number(trial.residual_floors)} × rounding"
