"""Log-probs that are logarithms to another base than e, on one side or on both, as `stats.bases` tells them."""

import math

import numpy as np

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.bases import OtherBase, SideSums, base_of_entropies
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

COLUMNS = {
    "log_pi": "The training path's log-probs",
    "log_mu": "The engine's log-probs",
    "both": "The log-probs of both sides",
}


def other_base(disagreement: Disagreement) -> Cause | None:
    """The cause where one side is proportional to the other by the logarithm of a base, or both are to pi's entropy."""
    pair = disagreement.pair
    sums = SideSums.of(pair.log_pi, pair.log_mu)
    base = sums.base
    if base is not None:
        return _cause(base, _of_sides(sums, base))
    if pair.entropy_pi is None:
        return None
    base = base_of_entropies(pair.log_pi, pair.entropy_pi)
    if base is None or base.column != "both":
        return None
    return _cause(base, _of_both(pair))


def _cause(base: OtherBase, evidence: str) -> Cause:
    advice = f"Multiply them by ln {base.base} = {base.nats:.4f}, or write natural log-probs (log, not log{base.base})"
    if base.column == "both":
        advice += "; where they are natural, it is the entropies that are in another unit"
    return Code.OTHER_BASE.cause(
        column=COLUMNS[base.column],
        base=base.name,
        evidence=[evidence],
        advice=[f"{advice}."],
    )


def _of_sides(sums: SideSums, base: OtherBase) -> str:
    what = (
        f"1/ln {base.base} is {1 / base.nats:.4f}" if base.column == "log_pi" else f"ln {base.base} is {base.nats:.4f}"
    )
    return (
        f"log pi is {sums.slope(base):.4f} times log mu, where {what}, and near it in "
        f"{write_percent(sums.near_share(base))} of the tokens that neither side is sure of: a temperature or a cut "
        "vocabulary moves each context otherwise"
    )


def _of_both(pair: TokenPair) -> str:
    assert pair.entropy_pi is not None
    surprisal = -float(np.mean(pair.log_pi, dtype=np.float64))
    entropy = float(np.mean(pair.entropy_pi, dtype=np.float64))
    times = surprisal / entropy if entropy > 0 else math.inf
    return (
        f"-log pi is {write_number(surprisal)} on average and pi's entropy {write_number(entropy)}: {times:.3g} times, "
        "for sure and for unsure tokens alike, where tokens drawn from pi have the same mean"
    )
