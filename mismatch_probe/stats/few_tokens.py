"""Few tokens that hold half of the divergence or more: a fault of single numbers, or a tail heavier than the sample."""

from collections.abc import Callable
from typing import Final

import numpy as np

from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.results import FewTokens
from mismatch_probe.stats.sequences import Ints, TokenPair

HALF: Final = 0.5
FEW: Final = 5
FEW_SHARE: Final = 2e-3
_ONE_OF: Final = 100
"""Tokens for each of the few: sound sides in BF16 need one of fifty at least to hold half, and most one of ten."""
_ALIKE: Final = 0.5
"""Of the smallest of the few, the least that another token has which is counted with them."""


def few_tokens(pair: TokenPair, place: Callable[[int, int], tuple[str, int]]) -> FewTokens | None:
    """The tokens that hold more than half of the sum of k3, where these are 5 at most, or 1 in 500; None elsewhere, and
    of fewer than 100 tokens.

    place: the name of the response of a row of the pair, and the position in it, of the token at a position of that
    row.
    """
    terms = k3_terms(pair.diff)
    total = float(terms.sum())
    most = int(max(min(FEW, terms.size / _ONE_OF), FEW_SHARE * terms.size))
    if most < 1 or not 0 < total < np.inf:
        return None
    chosen = _fewest(terms, total, most)
    if chosen is None:
        return None
    largest = int(chosen[0])
    row = int(np.searchsorted(pair.sequences.offsets, largest, side="right")) - 1
    response, position = place(row, largest - int(pair.sequences.offsets[row]))
    return FewTokens(
        num_tokens=chosen.size,
        of_tokens=terms.size,
        share_of_kl=float(terms[chosen].sum()) / total,
        zeros_pi=int((pair.log_pi[chosen] == 0).sum()),
        zeros_mu=int((pair.log_mu[chosen] == 0).sum()),
        response=response,
        position=position,
        log_pi=float(pair.log_pi[largest]),
        log_mu=float(pair.log_mu[largest]),
    )


def _fewest(terms: np.ndarray, total: float, most: int) -> Ints | None:
    """Indices of the largest terms that hold half together, and of those like them, largest first; None where these are
    more than `most`.
    """
    largest = np.argpartition(-terms, min(most, terms.size - 1))[: most + 1]
    order = largest[np.argsort(-terms[largest], kind="stable")][:most]
    held = np.cumsum(terms[order])
    if held[-1] <= HALF * total:
        return None
    needed = int(np.searchsorted(held, HALF * total, side="right")) + 1
    alike = int((terms[order] >= _ALIKE * terms[order[needed - 1]]).sum())
    return np.asarray(order[: max(needed, alike)])
