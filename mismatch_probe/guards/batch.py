"""The responses of a step as a trainer holds them, and what is summed over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mismatch_probe.arrays import ArrayLike, LabelsLike, Layout, as_numbers, is_unrecorded
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.departure_totals import DepartureTotals, SurpriseTotals, TemperatureTotals
from mismatch_probe.guards.plausible import require_plausible
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.sums import BaseTotals, Sums
from mismatch_probe.stats.bases import base_of_entropies
from mismatch_probe.stats.copies import RowCopyTotals, row_totals
from mismatch_probe.stats.pair_totals import PairTotals, PartnerTotals
from mismatch_probe.stats.sequences import (
    MOST_ROUNDED_UP,
    Ints,
    Mask,
    Reals,
    Sequences,
    TokenPair,
    is_usable,
    of_sampled_tokens,
)
from mismatch_probe.stats.zeros import LeftOutTotals, sides_without_zeros

_FAR_APART_NATS: Final = 0.2
"""Rms of d in a response, which no format's rounding makes of a whole one."""


_MEANING_OF_TRUE: Final = {
    "in_part": "True where tokens may lack a log-prob, else False",
    "computed_apart": "True where each side was computed, else False",
}


@dataclass(frozen=True)
class Batch:
    """One step's responses, or one rank's share of them; the responses to one prompt belong on one rank."""

    log_pi: ArrayLike | None = None
    """Log-probs of the sampled tokens under the policy that trains, before the update: nats, raw, before any mask or
    correction; arrays [B, T], lists of 1-D arrays, or tensors. NaN where one is absent.
    """
    log_mu: ArrayLike | None = None
    """Log-probs of the same tokens under the policy that sampled them."""
    mask: ArrayLike | bool | None = None
    """1 where a token was sampled, else 0; True where every row is full. Arrays [B, T] need it; all tokens of lists
    count without it, and what a numpy masked array hides never does.
    """
    entropy: ArrayLike | None = None
    """Of pi's distribution at each token, nats."""
    prompt_ids: LabelsLike | None = None
    """What identifies the prompt of each response [B]: one value or one row of token ids."""
    rewards: ArrayLike | RewardTotals | None = None
    """One a response [B], or, on one of several ranks, the totals of all ranks' responses."""
    truncated: ArrayLike | None = None
    """Whether each response was cut at the length limit [B]. What is None switches off the guards that need it."""
    in_part: bool = True
    """Whether a log-prob or entropy that is absent was not recorded: the other tokens are measured where at most 5 % of
    them, by number and by surprisal, lack one. Else each absent one is a fault.
    """
    computed_apart: bool = False
    """Whether each side was computed by itself, so that equal bits are no copy."""

    def measure(self) -> Sums:
        """What guards read of it, as sums: cheap, and nothing that depends on other ranks.

        Raises:
            UsageError: the arrays are not of the same tokens and responses, a 2-D one has no mask, or it is inverted;
                or in_part or computed_apart is neither true nor false.
        """
        for name, flag in (("in_part", self.in_part), ("computed_apart", self.computed_apart)):
            if not isinstance(flag, bool | np.bool_):
                raise UsageError(f"{name} is {flag!r:.40}: give {_MEANING_OF_TRUE[name]}")
        name, column = self._laid_out()
        layout = Layout.of(column, self.mask, name, self.log_pi, self.log_mu, self.entropy)
        require_plausible(layout, name, self.log_pi, self.log_mu, self.entropy)
        prompts = None if self.prompt_ids is None else layout.groups(self.prompt_ids, "prompt_ids")
        is_cut = None if self.truncated is None else layout.flags(self.truncated, "truncated")
        lengths = layout.lengths
        return replace(
            self._of_tokens(layout, name, prompts),
            rewards=self._of_rewards(layout, prompts, is_cut),
            responses=float(len(lengths)),
            tokens=float(lengths.sum()),
            highest_length=float(lengths.max(initial=0)),
            cut=0.0 if is_cut is None else float(is_cut.sum()),
            cut_known=0.0 if is_cut is None else float(len(is_cut)),
        )

    def _of_rewards(self, layout: Layout, prompts: Ints | None, is_cut: Mask | None) -> RewardTotals:
        if self.rewards is None or isinstance(self.rewards, RewardTotals):
            return self.rewards or RewardTotals()
        return RewardTotals.of(as_numbers(layout.of_rows(self.rewards, "rewards")), prompts, is_cut)

    def _laid_out(self) -> tuple[str, ArrayLike]:
        """The first of the arrays over tokens that is there, by its name."""
        for name in ("log_pi", "log_mu", "entropy", "mask"):
            column = getattr(self, name)
            if column is not None:
                return name, column
        raise UsageError("a batch without log_pi, log_mu and mask says nothing of its tokens: give one of them")

    def _of_tokens(self, layout: Layout, like: str, prompts: Ints | None) -> Sums:
        """Of the tokens of both sides; nothing where one was not given. The surprise of pi needs no log-prob of mu."""
        if self.log_pi is None or self.log_mu is None:
            return Sums()
        log_pi = layout.log_probs(self.log_pi, "log_pi", like)
        log_mu = of_sampled_tokens(layout.log_probs(self.log_mu, "log_mu", like))
        entropy = None if self.entropy is None else layout.flat(self.entropy, "entropy", like)
        entropies = entropy
        if entropy is not None and _is_in_another_base(log_pi, entropy):
            entropy = None
        given_pi, given_mu = log_pi, log_mu
        above_zero = np.fmax(log_pi, log_mu) > MOST_ROUNDED_UP
        above_zero |= False if entropy is None else entropy < -MOST_ROUNDED_UP
        if self.in_part:
            starts = np.concatenate([[0], np.cumsum(layout.lengths[layout.lengths > 0])])
            log_pi, log_mu = sides_without_zeros(log_pi, log_mu, starts)
        is_nothing = is_unrecorded(log_mu) and (is_unrecorded(log_pi) or not self.in_part)
        missing_mu = ~is_usable(log_mu) | is_nothing
        no_numbers = ((given_pi == 0) & np.isnan(log_pi)) | ((given_mu == 0) & missing_mu)
        has_pi = is_usable(log_pi) & (log_pi <= MOST_ROUNDED_UP)
        has_pi &= True if entropy is None else np.isfinite(entropy) & (entropy >= -MOST_ROUNDED_UP)
        usable = has_pi & ~missing_mu & ~(log_mu > MOST_ROUNDED_UP)
        faults = _are_faults(log_pi, log_mu, entropy) if self.in_part else ~usable
        seen_pi, seen_mu = (np.where(is_usable(side), side, np.nan) for side in (log_pi, log_mu))
        left_out = LeftOutTotals.of(seen_pi, np.where(missing_mu, np.nan, seen_mu), usable)
        counts = Sums(
            faults=float(faults.sum()),
            missing_mu=float(missing_mu.sum()),
            zeros=float(no_numbers.sum()),
            above_zero=float(above_zero.sum()),
            with_entropy=0.0 if entropy is None else float(len(entropy)),
            left_out=left_out,
            rows=RowCopyTotals() if self.computed_apart else _copy_totals(log_pi, log_mu, layout.lengths),
        )
        is_there = layout.lengths > 0
        if not usable.any():
            return counts
        of_present_rows = Sequences.of_lengths(layout.lengths[is_there], None if prompts is None else prompts[is_there])
        sequences = of_present_rows.of_usable_tokens(usable)
        assert sequences is not None
        of_entropy = None if entropy is None else entropy[usable]
        pair = TokenPair(sequences, log_pi[usable], log_mu[usable], entropy_pi=of_entropy)
        counts = replace(
            counts,
            pair=PairTotals.of(pair),
            departure=DepartureTotals.of(pair),
            bases=_bases(log_pi[usable], log_mu[usable], None if entropies is None else entropies[usable]),
            partners=PartnerTotals.of(pair, _FAR_APART_NATS),
        )
        if entropy is None or of_entropy is None:
            return counts
        return replace(
            counts,
            temperature=TemperatureTotals.of(
                pair.diff, log_pi[usable], of_entropy, sequences.spread(sequences.clusters)
            ),
            surprise=SurpriseTotals.of(log_pi[has_pi], entropy[has_pi]),
        )


def _copy_totals(log_pi: Reals, log_mu: Reals, lengths: Ints) -> RowCopyTotals:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return RowCopyTotals.of(row_totals(log_pi, log_mu, rows, len(lengths)))


def _bases(log_pi: Reals, log_mu: Reals, entropy: Reals | None) -> BaseTotals:
    """Of tokens [T]; of the entropies only where all are numbers."""
    return BaseTotals.of(log_pi, log_mu, entropy if entropy is not None and np.isfinite(entropy).all() else None)


def _is_in_another_base(log_pi: Reals, entropy: Reals) -> bool:
    """Whether the entropies would call the engine another one for their unit, or that of pi, alone."""
    usable = is_usable(log_pi) & np.isfinite(entropy)
    return base_of_entropies(log_pi[usable], entropy[usable]) is not None


def _are_faults(log_pi: Reals, log_mu: Reals, entropy: Reals | None) -> Mask:
    """Where a number cannot be right: it is infinite, a log-prob above 0, or an entropy below 0."""
    faults = np.isinf(log_pi) | np.isinf(log_mu) | (np.fmax(log_pi, log_mu) > MOST_ROUNDED_UP)
    return np.asarray(faults if entropy is None else faults | np.isinf(entropy) | (entropy < -MOST_ROUNDED_UP))
