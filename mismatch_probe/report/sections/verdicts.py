"""The verdict on each pair with its evidence, and where to look when there is a bug or doubt."""

from collections.abc import Sequence

from markupsafe import Markup

from mismatch_probe.records.summary import Cause, PairSummary, Summary
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import pair_key, pair_label
from mismatch_probe.report.view import Badge, Finding, Section
from mismatch_probe.report.where_to_look import where_to_look

_FINE = ("clean", "precision")


def verdicts(summary: Summary) -> Section:
    return Section(
        "verdicts",
        "Verdict on each pair",
        "FP32 against FP32 decides: a gap that stays there is a bug; a gap that closes there is precision.",
        [_finding(pair, summary.verdict.advice) for pair in summary.pairs],
    )


def _other(cause: Cause) -> Markup:
    evidence = [f"Evidence: {'; '.join(cause.evidence)}."] if cause.evidence else []
    return Markup("<code>{}</code>: {}").format(
        cause.code, visible(" ".join([cause.sentence, *evidence, *cause.advice]))
    )


def _finding(pair: PairSummary, said_above: Sequence[str]) -> Finding:
    verdict = pair.verdict
    lists: list[tuple[str, list[str] | list[Markup]]] = [("Evidence", verdict.evidence)]
    is_fine = verdict.kind in _FINE
    if not is_fine:
        lists.append(("Where to look", where_to_look(pair)))
    lists.append(("Advice", [advice for advice in verdict.advice if advice not in said_above]))
    lists.append(("Also seen", [_other(cause) for cause in verdict.also]))
    return Finding(
        f"verdict-{pair_key(pair)}",
        pair_label(pair),
        Badge.of(verdict),
        verdict.sentence,
        [(heading, items) for heading, items in lists if items],
        folded=is_fine,
    )
