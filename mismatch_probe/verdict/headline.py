"""The whole run in a sentence, and the verdict that stands for it."""

from collections.abc import Sequence

from mismatch_probe.notation import write_estimate, write_token_count, write_tokens
from mismatch_probe.records.summary import Contrast, PairSummary, Verdict
from mismatch_probe.verdict.codes import Code

_SEVERITY = ("broken", "bug", "undecided", "precision", "clean")
_NO_MEASURE_OF_PRECISION = ("broken", "bug")


def overall(pairs: Sequence[PairSummary]) -> Verdict:
    """The most serious verdict among the pairs."""
    return min((pair.verdict for pair in pairs), key=lambda verdict: _SEVERITY.index(verdict.kind))


def measures_precision(verdict: Verdict) -> bool:
    """Whether the pair's numbers say what its formats do, so that they can be so many times those of another."""
    return verdict.kind not in _NO_MEASURE_OF_PRECISION


def headline(pairs: Sequence[PairSummary], contrasts: Sequence[Contrast]) -> str:
    """What an engineer reads first: size, length budget, cause, and what another dtype of this run would change."""
    verdict = overall(pairs)
    if verdict.kind == "clean" or not measures_precision(verdict) or verdict.code == Code.OTHER_CHECKPOINT:
        return verdict.sentence
    worst = worst_pair(pairs)
    sides = "the log's sides differ" if worst.is_logged else f"{_name(worst)} differs from the engine"
    parts = [f"{sides} by KL {write_estimate(worst.metrics['kl_k3']).value} a token"]
    length = worst.length
    if length is not None and length.budget_tokens is not None:
        parts.append(
            f"the length budget at ESS {length.budget_ess:g} is {write_tokens(length.budget_tokens).value} tokens, "
            f"the median response here {write_token_count(length.median_response)}"
        )
    if verdict.kind == "precision":
        parts.append("no bug found: FP32 agrees")
    elif worst.is_logged:
        parts.append("`explain` with the checkpoint tells whether it is a bug")
    else:
        parts.append("no FP32 pair was run to rule out a bug")
    if best := closest(worst, contrasts):
        parts.append(f"{best.over.upper()} is {write_estimate(best.ratio).value} times closer")
    sentence = "; ".join(parts) + "."
    return sentence[0].upper() + sentence[1:] if worst.is_logged else sentence


def worst_pair(pairs: Sequence[PairSummary]) -> PairSummary:
    """The pair of the largest token KL."""
    return max((pair for pair in pairs if "kl_k3" in pair.metrics), key=lambda pair: pair.metrics["kl_k3"].value)


def closest(pair: PairSummary, contrasts: Sequence[Contrast]) -> Contrast | None:
    """What `pair` is so many times farther apart than, where that is sure of any."""
    surely = (
        contrast
        for contrast in contrasts
        if contrast.metric == "kl_k3"
        and contrast.of == _key(pair)
        and contrast.ratio.low is not None
        and contrast.ratio.low > 1
    )
    return max(surely, key=lambda contrast: contrast.ratio.value, default=None)


def _key(pair: PairSummary) -> str:
    return pair.train if pair.train == pair.infer else f"{pair.train}/{pair.infer}"


def _name(pair: PairSummary) -> str:
    return _key(pair).upper() if pair.is_of_dtypes else _key(pair)
