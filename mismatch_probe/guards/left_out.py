"""What is said of the tokens of a step that lack a log-prob."""

import warnings

from mismatch_probe.guards.sums import Sums
from mismatch_probe.notation import write_count, write_many, write_percent, write_share
from mismatch_probe.stats.left_out import MOST_LEFT_OUT_OF_A_PASS, LeftOutTotals


def left_out_sentence(left_out: LeftOutTotals) -> str | None:
    """How many there are, and whether the others are measured; None where there is none."""
    out, tokens = int(left_out.out), int(left_out.tokens)
    if not out:
        return None
    of_surprisal = f"{write_share(left_out.of_surprisal, 1)} of the surprisal"
    what = f"{write_count(out)} of {write_many(tokens, 'token')} ({write_share(out, tokens)}, {of_surprisal})"
    if left_out.are_few:
        return f"{what} lack a log-prob and are left out"
    most = write_percent(MOST_LEFT_OUT_OF_A_PASS)
    if of_neither := int(left_out.of_neither):
        what += f", {write_count(of_neither)} of them on both sides, where each may be as rare as the rarest"
    return f"{what} lack a log-prob, and more than {most} (by number, or by surprisal) leave nothing to judge by"


def tell_of_left_out(step: int, sums: Sums | None, told: frozenset[str]) -> frozenset[str]:
    """Warns of them once where the others are measured, and once where they are not. told: what was warned of."""
    sentence = None if sums is None or sums.faults else left_out_sentence(sums.left_out)
    key = f"left out, the others measured: {sums is not None and sums.is_measured}"
    if sentence is None or key in told:
        return told
    warnings.warn(f"step {step}: {sentence}; this is told once", stacklevel=3)
    return told | {key}
