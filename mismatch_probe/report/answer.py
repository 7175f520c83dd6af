"""What a run comes to in a sentence and a few facts: the first line of the page and of the terminal."""

from collections.abc import Iterator, Sequence
from typing import Final

from mismatch_probe.notation import write_token_count
from mismatch_probe.records.findings import Document
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.pairs import budget
from mismatch_probe.verdict.headline import foremost, headline
from mismatch_probe.verdict.no_bug import where_the_error_is

_OF_PRECISION: Final = ("precision", "undecided")


def short_answer(summary: Summary) -> str:
    """The headline as it is told today, of runs of earlier versions too."""
    return headline(summary.pairs, summary.contrasts, summary.preflight)


def facts(summary: Summary, filed: Sequence[Document]) -> list[tuple[str, str]]:
    """What an engineer asks of the worst pair, each under a word or two: how long responses may be, who errs, whether
    FP16 fits where that was measured. `filed` was found beside the run.
    """
    pair = foremost(summary.pairs)
    measured = [*_length(pair), *_blame(pair)] if pair.verdict.kind in _OF_PRECISION else []
    return [*measured, *(("FP16", document.verdict.sentence) for document in filed if isinstance(document, Headroom))]


def _length(pair: PairSummary) -> Iterator[tuple[str, str]]:
    law, written = pair.length, budget(pair)
    if law is None or not written.interval:
        return
    yield (
        "Length budget",
        f"{written} tokens at ESS {law.budget_ess:g}; responses here have {write_token_count(law.median_response)} at "
        f"the median, {write_token_count(law.measured_up_to)} at most",
    )


def _blame(pair: PairSummary) -> Iterator[tuple[str, str]]:
    if pair.blame is not None and pair.blame.share_pi is not None:
        yield "Who errs", f"the error against the reference is {where_the_error_is(pair.blame.share_pi)}"
