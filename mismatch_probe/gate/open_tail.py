"""A limit that the interval keeps and the tail may break: how many tokens would decide."""

from dataclasses import dataclass
from typing import Final

from mismatch_probe.gate.claims import Claim
from mismatch_probe.gate.config import Check

MOST_TIMES: Final = 2**10


@dataclass(frozen=True)
class OpenTail:
    """tokens: about how many pass, were they like these; None where a thousand times as many do not."""

    tokens: int | None


def open_tail(claim: Claim, check: Check, num_tokens: int, alpha: float) -> OpenTail | None:
    """Whether what is too rare for the sample alone keeps a limit from passing; None where it is not that."""
    if not claim.is_held_back_by_tail(check.limit, alpha, upper=check.upper):
        return None
    times = 2
    while times <= MOST_TIMES:
        if claim.within(check.limit, alpha, upper=check.upper, times=times):
            return OpenTail(rounded(times * num_tokens))
        times *= 2
    return OpenTail(None)


def rounded(number: int) -> int:
    return int(float(f"{number:.1e}"))
