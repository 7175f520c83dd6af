"""What is said of a batch's numbers: those that are missing, and those that can hardly be."""

import warnings
from typing import Final

import numpy as np

from mismatch_probe.arrays import ENOUGH_TOKENS, ArrayLike, Layout
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.sums import Sums
from mismatch_probe.notation import write_count, write_many, write_percent, write_share
from mismatch_probe.stats.bases import LARGEST_VOCABULARY, OtherBase, base_of_entropies, base_of_sides, most_entropy
from mismatch_probe.stats.sequences import Floats, Ints, Mask, is_usable
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS, LeftOutTotals

_LARGE_SHARE: Final = 0.25
"""Of the rows: where a mask is inverted in fewer, single responses may be so certain."""
_ROUNDING: Final = 0.05
"""Nats: BF16 knows an entropy of 12 nats to that."""
_RUN_OF_PADDING: Final = 8
_HARDLY: Final = 0.1
"""Of the other tokens of a row: where more have nothing on both sides, the policy is sure of many."""
_UNLIKELY_NATS: Final = 20.0


def require_plausible(
    layout: Layout, like: str, log_pi: ArrayLike | None, log_mu: ArrayLike | None, entropy: ArrayLike | None
) -> None:
    """Warns of what is only likely: a mask that is inverted in some rows, counts padding or leaves nothing of many,
    rows that are copies, a side or entropies in another base than e, entropies that no vocabulary has. The arrays are
    those of a `Batch`, laid out as the one called `like`.

    Raises:
        UsageError: the mask is inverted in every row, or the arrays are laid out otherwise.
    """
    for name, side in (("log_mu", log_mu), ("log_pi", log_pi)):
        if side is not None:
            _require_upright(layout, side, name, like)
    flat_pi = None if log_pi is None else layout.flat(log_pi, "log_pi", like)
    if flat_pi is None:
        return
    flat_mu = None if log_mu is None else layout.flat(log_mu, "log_mu", like)
    base = None
    if flat_mu is not None:
        _look_at_rows(layout, flat_pi, flat_mu)
        usable = is_usable(flat_pi) & is_usable(flat_mu)
        base = base_of_sides(flat_pi[usable], flat_mu[usable])
    if entropy is not None:
        of_entropy = _look_at_entropy(flat_pi, layout.flat(entropy, "entropy", like))
        base = base or of_entropy
    if base is not None:
        _warn_of_base(base)


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


def _look_at_entropy(log_pi: Floats, entropy: Floats) -> OtherBase | None:
    """The base that the entropies, or the log-probs of both sides, look to be in, where it is another one."""
    usable = is_usable(log_pi) & np.isfinite(entropy)
    log_pi, entropy = log_pi[usable], entropy[usable]
    if entropy.size and entropy.max() > most_entropy(None) + _ROUNDING:
        warnings.warn(
            f"entropy is above {most_entropy(None):.1f} nats, the most that a vocabulary of {LARGEST_VOCABULARY:,} "
            "tokens has: give that of each token's distribution, in nats",
            stacklevel=5,
        )
        return None
    return base_of_entropies(log_pi, entropy)


def _warn_of_base(base: OtherBase, by: str = "", stacklevel: int = 5) -> None:
    names = {"both": "log_pi and log_mu look", "entropy": "entropy looks"}
    unused = {"both": ", and entropy is not used", "entropy": ", and is not used"}
    warnings.warn(
        f"{names.get(base.column, f'{base.column} looks')} like logarithms to {base.name}{by}"
        f"{unused.get(base.column, '')}: give natural ones, that are these times ln {base.base}",
        stacklevel=stacklevel,
    )


def tell_of_base(step: int, sums: Sums | None, base: OtherBase | None, told: frozenset[str]) -> frozenset[str]:
    """Warns once of what the last steps together show to be in another base, and the last one alone does not. told:
    what was warned of.
    """
    key = f"in another base: {base}"
    if base is None or sums is None or not sums.with_entropy or key in told:
        return told
    _warn_of_base(base, f" (by the tokens up to step {step})", stacklevel=4)
    return told | {key}


def _look_at_rows(layout: Layout, log_pi: Floats, log_mu: Floats) -> None:
    """Padding that the mask counts, rows that it leaves nothing of, rows that stand there twice."""
    lengths = layout.lengths
    if 2 * (lengths == 0).sum() >= max(1, len(lengths)) and lengths.any():
        warnings.warn("half of the responses or more have no token that counts: look at their mask", stacklevel=5)
    lengths = lengths[lengths > 0]
    if lengths.size and _is_padded(log_pi, log_mu, lengths).sum() >= max(1, _LARGE_SHARE * lengths.size):
        warnings.warn(
            f"many of the responses begin or end with {_RUN_OF_PADDING} tokens or more that both sides give 0 or "
            "nothing, and have others: padding counts as tokens; give mask, 1 where a token was sampled",
            stacklevel=5,
        )
    if _copies(log_pi, log_mu, lengths):
        warnings.warn(
            "responses repeat the log-probs of another one bit for bit, and are too improbable to be sampled twice: "
            "rows were copied",
            stacklevel=5,
        )


def _is_padded(log_pi: Floats, log_mu: Floats, lengths: Ints) -> Mask:
    """Rows that start or end with a run of tokens that have nothing on both sides, and have hardly any others [N]."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    has_one = (is_usable(log_pi) & (log_pi != 0)) | (is_usable(log_mu) & (log_mu != 0))
    places = np.arange(has_one.size)
    first = np.minimum.reduceat(np.where(has_one, places, has_one.size), starts)
    last = np.maximum.reduceat(np.where(has_one, places, -1), starts)
    at_ends = (first - starts) + (ends - 1 - last)
    with_one = np.add.reduceat(has_one, starts, dtype=np.int64)
    longest = np.maximum(first - starts, ends - 1 - last)
    without_inside = lengths - with_one - at_ends
    return np.asarray((np.minimum(longest, with_one) >= _RUN_OF_PADDING) & (without_inside < _HARDLY * with_one))


def _copies(log_pi: Floats, log_mu: Floats, lengths: Ints) -> int:
    """Rows that repeat another one's numbers and are too improbable to be drawn twice."""
    if not lengths.size:
        return 0
    ends = np.cumsum(lengths)
    surprisal = np.add.reduceat(np.where(is_usable(log_mu), -log_mu, 0.0), ends - lengths)
    unlikely = np.flatnonzero(surprisal > _UNLIKELY_NATS)
    rows = [slice(ends[row] - lengths[row], ends[row]) for row in unlikely]
    return len(rows) - len({hash(log_pi[row].tobytes() + log_mu[row].tobytes()) for row in rows})


def _beside_the_most(share: float) -> str:
    """A share that is not rounded to the most that may be left out where it is more."""
    most = write_share(MOST_LEFT_OUT_OF_A_PASS, 1)
    written = write_share(share, 1)
    return f"just over {most}" if written == most and share > MOST_LEFT_OUT_OF_A_PASS else written


def left_out_sentence(left_out: LeftOutTotals) -> str | None:
    """How many there are, and whether the others are measured; None where there is none."""
    out, tokens = int(left_out.out), int(left_out.tokens)
    if not out:
        return None
    of_surprisal = f"{_beside_the_most(left_out.of_surprisal)} of the surprisal"
    what = f"{write_count(out)} of {write_many(tokens, 'token')} ({_beside_the_most(out / tokens)}, {of_surprisal})"
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
