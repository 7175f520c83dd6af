"""What an engineer asks first of the worst pair: how large, how long may responses be, what is closer."""

from typing import Final

from mismatch_probe.notation import ABSENT, write_estimate, write_token_count
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.pairs import budget
from mismatch_probe.report.view import Tile
from mismatch_probe.verdict.headline import KL_LIMIT, against_limit, closest, foremost, measures_precision

_WHOLE: Final = 10


def tiles(summary: Summary) -> list[Tile]:
    """None where no pair measures a difference of precision, or none differs."""
    measured = any("kl_k3" in pair.metrics for pair in summary.pairs)
    if not measured or summary.verdict.kind == "clean" or not measures_precision(summary.verdict):
        return []
    pair = foremost(summary.pairs)
    return [_size(pair), *_length(pair), *_closer(summary, pair)]


def _size(pair: PairSummary) -> Tile:
    kl = pair.metrics["kl_k3"]
    return Tile(
        f"{pair_label(pair)}: KL per token", write_estimate(kl).value, f"{against_limit(kl.value)} ({KL_LIMIT:g})"
    )


def _length(pair: PairSummary) -> list[Tile]:
    law = pair.length
    written = budget(pair).value
    if law is None or written == ABSENT:
        return []
    tokens = law.budget_tokens or law.budget_closed_form
    assert tokens is not None
    median = law.median_response
    times = tokens.value / median
    rounded = float(f"{times:.2g}")
    compared = f"{rounded:,.0f}" if rounded >= _WHOLE else f"{rounded:g}"
    note = f"{compared} times the median response here, {write_token_count(median)} tokens"
    return [Tile(f"Length budget at ESS {law.budget_ess:g}", f"{written} tokens", note)]


def _closer(summary: Summary, pair: PairSummary) -> list[Tile]:
    best = closest(pair, summary.contrasts)
    if best is None:
        return []
    ratio = write_estimate(best.ratio)
    return [Tile("Closest dtype in this run", best.over.upper(), f"{ratio.value} {ratio.interval} times closer in KL")]
