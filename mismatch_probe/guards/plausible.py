"""What a batch cannot be, or hardly: a mask that is inverted, entropies in bits."""

import math
import warnings
from typing import Final

import numpy as np

from mismatch_probe.arrays import ENOUGH_TOKENS, ArrayLike, Layout
from mismatch_probe.errors import UsageError
from mismatch_probe.stats.sequences import Floats, is_usable

_LARGE_SHARE: Final = 0.25
"""Of the rows: where a mask is inverted in fewer, single responses may be so certain."""
_TOKENS_FOR_UNITS: Final = 1000
_AGREES: Final = 3.0
_DIFFERS: Final = 5.0
"""Standard errors of a mean."""


def require_plausible(
    layout: Layout, like: str, log_pi: ArrayLike | None, log_mu: ArrayLike | None, entropy: ArrayLike | None
) -> None:
    """Warns of what is only likely: a mask that is inverted in some rows, entropies that look like bits. The arrays are
    those of a `Batch`, laid out as the one called `like`.

    Raises:
        UsageError: the mask is inverted in every row, or the arrays are laid out otherwise.
    """
    for name, side in (("log_mu", log_mu), ("log_pi", log_pi)):
        if side is not None:
            _require_upright(layout, side, name, like)
    if log_pi is not None and entropy is not None:
        _look_at_units(layout.flat(log_pi, "log_pi", like), layout.flat(entropy, "entropy", like))


def _require_upright(layout: Layout, side: ArrayLike, name: str, like: str) -> None:
    """The mask is inverted in a row if all that it keeps lacks a log-prob, and some of what it leaves out has one."""
    kept = layout.counted
    if kept.all():
        return
    values = Layout(layout.row_lengths, np.ones_like(kept)).flat(side, name, like)
    has_one = is_usable(values) & (values != 0)
    row_of, rows = np.repeat(np.arange(len(layout.row_lengths)), layout.row_lengths), len(layout.row_lengths)
    out_with_one = np.bincount(row_of[~kept & has_one], minlength=rows)
    kept_with_one = np.bincount(row_of[kept & has_one], minlength=rows)
    num_kept = layout.lengths
    is_inverted = (num_kept > 0) & (kept_with_one == 0) & (out_with_one > 0)
    of_inverted = values[~kept & has_one & is_inverted[row_of]]
    if num_kept[is_inverted].sum() < ENOUGH_TOKENS or np.ptp(of_inverted) == 0:  # padding may have a value of its own
        return
    share = is_inverted.sum() / (num_kept > 0).sum()
    seen = (
        f"the tokens that it keeps have no log-prob in {name} (0, NaN or -9999), and those that it leaves out have one"
        ": give 1 where a token was sampled, else 0"
    )
    if share == 1:
        raise UsageError(f"mask is inverted: {seen}")
    if share >= _LARGE_SHARE:
        warnings.warn(f"mask looks inverted in many of the responses, where {seen}", stacklevel=5)


def _look_at_units(log_pi: Floats, entropy: Floats) -> None:
    """E[-log pi] is the entropy for tokens drawn from pi. In bits it is ln 2 times it, for sure and for unsure tokens.
    Tokens drawn at a lower temperature also surprise less, but not by one factor for both.
    """
    usable = is_usable(log_pi) & np.isfinite(entropy)
    log_pi, entropy = log_pi[usable], entropy[usable]
    if len(log_pi) < _TOKENS_FOR_UNITS:
        return
    is_unsure = entropy > np.median(entropy)
    in_bits = log_pi + math.log(2) * entropy
    halves = [_errors_from_0(in_bits[half]) for half in (is_unsure, ~is_unsure) if half.any()]
    if max(halves) <= _AGREES and _errors_from_0(log_pi + entropy) > _DIFFERS:
        warnings.warn(
            "entropy looks like bits, for its mean is 1.44 times that of -log_pi: give nats, that are bits times ln 2",
            stacklevel=4,
        )


def _errors_from_0(terms: Floats) -> float:
    """How many standard errors their mean is from 0: they are differences of a martingale, which do not correlate."""
    error = float(np.std(terms)) / math.sqrt(len(terms))
    return abs(float(terms.mean())) / error if error > 0 else math.inf
