"""Which of a batch's numbers are missing, and which can hardly be: signs, sizes, and entropies in another base."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, Final, Self

import numpy as np

from mismatch_probe.arrays import ENOUGH_TOKENS, ArrayLike, Layout
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.sums import BaseTotals, Metrics, Moments, NearTotals, Sums, base_metrics
from mismatch_probe.notation import write_count, write_many, write_percent, write_share
from mismatch_probe.stats.bases import (
    BASES,
    FEWEST_FOR_ENTROPIES,
    LARGEST_VOCABULARY,
    OtherBase,
    base_of_entropies,
    base_of_sides,
    entropies_differ,
    errors_from_0,
    most_entropy,
)
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
    is_kept = layout.is_counted
    if is_kept.all():
        return
    values = Layout(layout.row_lengths, np.ones_like(is_kept)).flat(side, name, like)
    has_one = is_usable(values) & (values != 0)
    row_of, rows = np.repeat(np.arange(len(layout.row_lengths)), layout.row_lengths), len(layout.row_lengths)
    out_with_one = np.bincount(row_of[~is_kept & has_one], minlength=rows)
    kept_with_one = np.bincount(row_of[is_kept & has_one], minlength=rows)
    num_kept = layout.lengths
    is_inverted = (num_kept > 0) & (kept_with_one == 0) & (out_with_one > 0)
    of_inverted = values[~is_kept & has_one & is_inverted[row_of]]
    if num_kept[is_inverted].sum() < ENOUGH_TOKENS or np.ptp(of_inverted) == 0:  # padding may have a value of its own
        return
    share = is_inverted.sum() / (num_kept > 0).sum()
    reason = (
        f"the tokens that it keeps have no log-prob in {name} (0, NaN or -9999), and those that it leaves out have one"
        ": give 1 where a token was sampled, else 0"
    )
    if share == 1:
        raise UsageError(f"mask is inverted: {reason}")
    if share >= _LARGE_SHARE:
        warnings.warn(f"mask looks inverted in many of the responses, where {reason}", stacklevel=5)


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
    effects = {"both": ", and entropy is not used", "entropy": ", and is not used"}
    warnings.warn(
        f"{names.get(base.column, f'{base.column} looks')} like logarithms to {base.name}{by}"
        f"{effects.get(base.column, '')}: give natural ones, that are these times ln {base.base}",
        stacklevel=stacklevel,
    )


def tell_of_base(step: int, sums: Sums | None, base: OtherBase | None, warned_of: frozenset[str]) -> frozenset[str]:
    """Warns once of what the last steps together show to be in another base, and the last one alone does not.

    warned_of: the keys of earlier warnings; the result has the new one too.
    """
    key = f"in another base: {base}"
    if base is None or sums is None or not sums.with_entropy or key in warned_of:
        return warned_of
    _warn_of_base(base, f" (by the tokens up to step {step})", stacklevel=4)
    return warned_of | {key}


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
    if _num_copies(log_pi, log_mu, lengths):
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


def _num_copies(log_pi: Floats, log_mu: Floats, lengths: Ints) -> int:
    """Rows that repeat another one's numbers and are too improbable to be drawn twice."""
    if not lengths.size:
        return 0
    ends = np.cumsum(lengths)
    surprisal = np.add.reduceat(np.where(is_usable(log_mu), -log_mu, 0.0), ends - lengths)
    improbable_rows = np.flatnonzero(surprisal > _UNLIKELY_NATS)
    rows = [slice(ends[row] - lengths[row], ends[row]) for row in improbable_rows]
    return len(rows) - len({hash(log_pi[row].tobytes() + log_mu[row].tobytes()) for row in rows})


def _beside_the_most(share: float) -> str:
    """A share that is not rounded to the most that may be left out where it is more."""
    most = write_share(MOST_LEFT_OUT_OF_A_PASS, 1)
    text = write_share(share, 1)
    return f"just over {most}" if text == most and share > MOST_LEFT_OUT_OF_A_PASS else text


def left_out_sentence(left_out: LeftOutTotals) -> str | None:
    """How many tokens are left out, and whether the others are measured; None where no token is."""
    num_left_out, tokens = int(left_out.out), int(left_out.tokens)
    if not num_left_out:
        return None
    of_surprisal = f"{_beside_the_most(left_out.of_surprisal)} of the surprisal"
    share = _beside_the_most(num_left_out / tokens)
    what = f"{write_count(num_left_out)} of {write_many(tokens, 'token')} ({share}, {of_surprisal})"
    if left_out.are_few:
        return f"{what} lack a log-prob and are left out"
    most = write_percent(MOST_LEFT_OUT_OF_A_PASS)
    if of_neither := int(left_out.of_neither):
        what += f", {write_count(of_neither)} of them on both sides, where each may be as rare as the rarest"
    return f"{what} lack a log-prob, and more than {most} (by number, or by surprisal) leave nothing to judge by"


def tell_of_left_out(step: int, sums: Sums | None, warned_of: frozenset[str]) -> frozenset[str]:
    """Warn of them once where the others are measured, and once where they are not.

    warned_of: the keys of earlier warnings; the result has the new one too.
    """
    sentence = None if sums is None or sums.faults else left_out_sentence(sums.left_out)
    key = f"left out, the others measured: {sums is not None and sums.is_measured}"
    if sentence is None or key in warned_of:
        return warned_of
    warnings.warn(f"step {step}: {sentence}; this warning comes once", stacklevel=3)
    return warned_of | {key}


_MOST_STEPS: Final = 128
"""As many as the guard `sampling` adds up."""
_BLOCKS_OF_A_SIZE: Final = 3
_OF_SURPRISE: Final = "mismatch/surprise_"
_BEFORE: Final = 1 + 2 * len(BASES) * len(fields(NearTotals))
_SURPRISE: Final = slice(_BEFORE, _BEFORE + len(fields(Moments)))
"""Where the array of `BaseTotals` holds `surprise`."""

StepBlock = tuple[int, Floats]
"""A number of steps, and the array of the sums of their `BaseTotals`."""


class EntropyBase:
    """Whether the entropies, or both sides, are in another base, by the last steps together.

    blocks: of 1, 1, 1, 2, 2, 2, 4, ... steps the sums, the newest first. The newest blocks whose mean of log p + H is
    the most standard errors from 0 are looked at, those since what they show began, and fewer of them, in case that it
    began within the oldest. base: None where they are in nats, or nobody knows; it stays until the newest blocks say
    that they are in nats. is_open: they differ from log p, and more tokens may show a base.
    """

    def __init__(self, blocks: Iterable[StepBlock] = ()) -> None:
        self.blocks = list(blocks)
        self.base: OtherBase | None = None
        self.is_open = False

    def metrics_of(self, sums: Sums) -> tuple[Metrics, tuple[str, ...]]:
        """Takes a step in: its metrics, and what is withheld of them. Entropies in another base are not used; while
        that is open, the surprise that follows from them is withheld.
        """
        self.take(sums.bases)
        metrics, withheld = sums.metrics(), sums.withheld
        if self.base is not None:
            bases = {name: base for name, base in base_metrics(self.base).items() if base}
            return sums.without_entropies().metrics() | bases, withheld
        open_metrics = [name for name in metrics if self.is_open and name.startswith(_OF_SURPRISE)]
        return {name: value for name, value in metrics.items() if name not in open_metrics}, (*withheld, *open_metrics)

    def take(self, totals: BaseTotals) -> None:
        """Takes a step in; one without entropies says nothing."""
        self.is_open = False
        if not totals.surprise.count:
            return
        self.blocks = list(_merge_blocks([(1, totals.to_array()), *self.blocks]))
        sums = list(accumulate(numbers for _, numbers in self.blocks))
        if self.base is not None:
            self._look_for_nats(sums)
            return
        errors = [errors_from_0(numbers[_SURPRISE]) for numbers in sums]
        start = errors.index(max(errors))
        if not entropies_differ(sums[start][_SURPRISE]):
            return
        fewest = sums[start][_SURPRISE][0] / 2
        candidates = [BaseTotals.of_array(numbers) for numbers in sums[start::-1] if numbers[_SURPRISE][0] >= fewest]
        bases = [base for each in candidates if (base := each.base) is not None and base.column in ("both", "entropy")]
        self.base = next(iter(bases), None)
        self.is_open = self.base is None and any(each.entropies.is_open for each in candidates)

    def _look_for_nats(self, sums: Sequence[Floats]) -> None:
        """Forgets the base, and the steps before, where the newest blocks with enough tokens are in nats."""
        index = next((end for end, each in enumerate(sums) if each[_SURPRISE][0] >= FEWEST_FOR_ENTROPIES), None)
        if index is not None and BaseTotals.of_array(sums[index]).entropies.are_nats:
            self.base, self.blocks = None, self.blocks[: index + 1]

    def state(self) -> dict[str, Any]:
        """JSON values."""
        base = None if self.base is None else [self.base.column, self.base.base]
        return {"base": base, "blocks": [[steps, numbers.tolist()] for steps, numbers in self.blocks]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """The sums that `state` gave.

        Raises:
            UsageError: a block has another shape.
            ValueError: a number of steps is below 1, sums are of no tokens, or the base is unknown.
        """
        blocks = [(steps, BaseTotals.of_array(numbers)) for steps, numbers in state.get("blocks", ())]
        if any(type(steps) is not int or steps < 1 or totals.impossible() for steps, totals in blocks):
            raise ValueError("the sums that tell a base are of no steps")
        result = cls((steps, totals.to_array()) for steps, totals in blocks)
        base = state.get("base")
        if base is not None and (len(base) != 2 or base[0] not in ("both", "entropy") or base[1] not in BASES):
            raise ValueError("there is no such base")
        result.base = None if base is None else OtherBase(*base)
        return result


def _merge_blocks(blocks: Iterable[StepBlock]) -> Iterator[StepBlock]:
    """Of each size three at most, as older ones become one of twice the size; the newest first, of `_MOST_STEPS`."""
    open_blocks: list[StepBlock] = []
    num_steps = 0
    for block in blocks:
        if num_steps >= _MOST_STEPS:
            return
        if open_blocks and open_blocks[0][0] != block[0]:
            yield from open_blocks
            open_blocks = []
        open_blocks.append(block)
        num_steps += block[0]
        if len(open_blocks) > _BLOCKS_OF_A_SIZE:
            *newest, (steps, newer), (_, older) = open_blocks
            yield from newest
            open_blocks = [(2 * steps, newer + older)]
    yield from open_blocks
