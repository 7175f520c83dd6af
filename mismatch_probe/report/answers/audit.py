"""`audit`: whether a server's tokens are those of the checkpoint that it should serve."""

from typing import Final

from mismatch_probe.notation import ABSENT, WrittenNumber, write_count, write_estimate, write_many, write_number
from mismatch_probe.records.examinations import Audit, AuditCandidate
from mismatch_probe.report.names import visible
from mismatch_probe.report.view import Answer, Badge, Block, Cell, Column, Lines, Note, Section, Table, Tile

_BADGES = {"clean": "as declared", "bug": "not as declared", "undecided": "undecided"}
_MODES = {
    "greedy": "greedy decoding",
    "predicted": "sampling with noise that is known",
    "sampled": "sampling with noise that is not known",
}


def audit_answer(audit: Audit) -> Answer:
    verdict = audit.verdict
    return Answer(
        subject="audit of a server",
        model=audit.model,
        headline=visible(verdict.sentence),
        badge=Badge(verdict.kind, _BADGES[verdict.kind]),
        tiles=_tiles(audit),
        facts=_facts(audit),
        advice=verdict.advice,
        table=_candidates(audit),
        footnote="Fits: the tokens are those that this would give, up to the rounding of the dtype."
        + (" Evidence: the log of the likelihood over that as declared, nats." if _has_evidence(audit) else ""),
        sections=_audit_sections(audit),
        screen=_screen(audit),
    )


def _tiles(audit: Audit) -> list[Tile]:
    agreement, law = audit.agreement, audit.law
    tiles = []
    if agreement is not None:
        noise = f"{write_number(agreement.noise_low)} to {write_number(agreement.noise_high)}"
        tiles += [
            Tile("Equal tokens", f"{100 * agreement.equal.value:.2f} %", "of the tokens that the checkpoint names"),
            Tile(
                "Moved, times the dtype's rounding", write_number(agreement.noise_times), f"{noise}; up to 3 is allowed"
            ),
        ]
    if law is not None:
        bounds = f"{law.temperature_low:.3f} to {law.temperature_high:.3f}"
        tiles.append(Tile("Temperature of the tokens", f"{law.temperature:.3f}", bounds))
    return tiles


def _facts(audit: Audit) -> list[str]:
    responses = audit.responses
    facts = [
        f"{write_many(responses.num_tokens, 'token')} of {write_many(responses.num_responses, 'response')} to "
        f"{write_many(responses.num_prompts, 'prompt')}, {_MODES[audit.mode]}",
        f"served by {responses.software or 'a server that does not name itself'} as {responses.model}",
    ]
    if responses.from_text:
        facts.append("text alone: its ids were made again by the checkpoint's tokenizer, which may cut it otherwise")
    if responses.num_empty:
        facts.append(f"{write_many(responses.num_empty, 'response')} without a token left out")
    return facts


_EVIDENCE: Final = "evidence"


def _has_evidence(audit: Audit) -> bool:
    """Whether a candidate is judged by likelihood; greedy tokens are not."""
    return any(each.log_evidence is not None for each in audit.candidates)


def _candidates(audit: Audit) -> Table:
    columns: list[Column[AuditCandidate]] = [
        Column("if the server does", lambda each: visible(each.what), is_text=True),
        Column("fits", lambda each: "yes" if each.fits else "no" if _is_judged(each) else ABSENT, is_text=True),
        Column("tokens differ", lambda each: ABSENT if each.num_differing is None else write_count(each.num_differing)),
        Column("times the rounding", _noise),
        Column(_EVIDENCE, lambda each: ABSENT if each.log_evidence is None else f"{each.log_evidence:.1f}"),
        Column(
            "tokens to tell it", lambda each: ABSENT if each.tokens_needed is None else write_count(each.tokens_needed)
        ),
    ]
    if not _has_evidence(audit):
        columns = [column for column in columns if column.title != _EVIDENCE]
    return Table.of("What was tried", audit.candidates, columns, is_stacked=True)


def _is_judged(candidate: AuditCandidate) -> bool:
    return candidate.kind != "as declared" or candidate.num_differing is not None


def _noise(candidate: AuditCandidate) -> Cell:
    if candidate.noise_times is None or candidate.noise_low is None or candidate.noise_high is None:
        return ABSENT
    low, high = write_number(candidate.noise_low), write_number(candidate.noise_high)
    return WrittenNumber(write_number(candidate.noise_times), f"[{low}, {high}]")


def _audit_sections(audit: Audit) -> list[Section]:
    blocks: list[Block] = [Note("Seen:", audit.verdict.evidence)]
    agreement = audit.agreement
    if agreement is not None:
        rows: list[list[Cell]] = [
            ["equal to the tokens named in FP32", write_estimate(agreement.equal)],
            [f"the same of {audit.settings.dtype.upper()} here", write_estimate(agreement.floor)],
            ["tokens that differ", write_count(agreement.num_differing)],
            ["expected by rounding", write_number(agreement.expected_differing)],
            ["near ties among them", write_count(agreement.near_ties)],
            ["largest gaps, nats", ", ".join(map(write_number, agreement.gaps[:8])) or "none"],
        ]
        blocks.append(Table("Tokens that the checkpoint names", ["", "tokens"], rows))
    if audit.cannot_tell:
        blocks.append(Note("What these tokens do not tell:", audit.cannot_tell))
    return [Section("audit-evidence", "What shows it", "", blocks)]


def _screen(audit: Audit) -> list[Table | Lines]:
    screen: list[Table | Lines] = [
        Lines([f"  {line}" for line in audit.verdict.evidence], follows=True),
        _candidates(audit),
    ]
    if audit.cannot_tell:
        screen.append(Lines(["What these tokens do not tell", *(f"  {line}" for line in audit.cannot_tell)], "dim"))
    screen.append(Lines(_facts(audit), "dim", follows=True))
    return screen
