"""The ragged arrays that every statistic reads: the response tokens of many sequences, one after another."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Reals = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
AnyFloat = TypeVar("AnyFloat", bound=np.floating[Any])

MOST_ROUNDED_UP: Final = 0.25
"""Nats above 0 that a log-prob may reach by rounding: logits below 64 in BF16 are 0.25 apart."""

MISSING_LOG_PROB: Final = -9984.0
"""vLLM writes -9999 in the place of a log-prob of minus infinity, or of none, which BF16 rounds to this: at or below it
there is no value."""

LEAST_SAMPLED: Final = -100.0
"""No sampler draws a token of a probability of 4e-44: an engine's log-prob at or below this stands for none, or for
that of another token. The ratio of two policies at such a token is beyond a float64 (e^710)."""


def of_sampled_tokens(log_probs: npt.NDArray[AnyFloat]) -> npt.NDArray[AnyFloat]:
    """The engine's log-probs of the tokens it drew, NaN where one is at or below LEAST_SAMPLED and so is missing."""
    impossible = np.isfinite(log_probs) & (log_probs <= LEAST_SAMPLED)
    return np.where(impossible, np.nan, log_probs) if impossible.any() else log_probs


def is_missing(log_probs: Reals) -> Mask:
    """Where no log-prob was delivered: NaN, or a number at or below MISSING_LOG_PROB; infinity is another fault."""
    return np.isnan(log_probs) | (np.isfinite(log_probs) & (log_probs <= MISSING_LOG_PROB))


def is_usable(log_probs: Reals) -> Mask:
    """Where a log-prob is finite and not missing."""
    return np.asarray(np.isfinite(log_probs) & (log_probs > MISSING_LOG_PROB))


@dataclass(frozen=True)
class Sequences:
    """The place of each sequence in the flat arrays, and the prompt that it answers.

    Raises:
        ValueError: offsets do not start at 0 and rise, or `clusters` has another length.
    """

    offsets: Ints
    """[N+1]: the tokens of sequence i are `offsets[i]:offsets[i+1]`; no sequence is empty."""
    clusters: Ints
    """[N]: the prompt of each sequence. Samples of one prompt are not independent: intervals cluster by it."""
    steps: Ints | None = None
    """[N]: the training step at which each sequence was sampled, -1 where it is not known; None outside a training."""
    complete: Mask | None = None
    """[N]: whether all tokens of the response are included, and not only those with log-probs; None means all."""
    places: Ints | None = None
    """[T]: the position of each token in its response, from 0, rising; None where no token is left out."""

    def __post_init__(self) -> None:
        if self.offsets.size < 2 or self.offsets[0] != 0 or (np.diff(self.offsets) < 1).any():
            raise ValueError("offsets must start at 0 and rise: there is no sequence, or one without a token")
        if self.clusters.size != self.num_sequences:
            raise ValueError(f"{self.clusters.size} clusters are given for {self.num_sequences} sequences")

    @classmethod
    def of_lengths(cls, lengths: npt.ArrayLike, clusters: npt.ArrayLike | None = None) -> "Sequences":
        """Sequences of these lengths [N]; each is a cluster of its own where `clusters` [N] is None."""
        counts = np.asarray(lengths, dtype=np.int64)
        numbers = np.arange(counts.size) if clusters is None else np.asarray(clusters, dtype=np.int64)
        return cls(np.concatenate([[0], np.cumsum(counts)]), numbers)

    def of_tokens(self, mask: Mask) -> "Sequences | None":
        """These sequences with some of their tokens [T], which keep their positions; None without a chosen token.

        Sequences without a chosen token are left out.
        """
        lengths = self.sum_by_sequence(mask).astype(np.int64)
        has_token = lengths > 0
        if not has_token.any():
            return None
        is_cut = bool((lengths[has_token] < self.lengths[has_token]).any())
        return replace(
            Sequences.of_lengths(lengths[has_token], self.clusters[has_token]),
            steps=None if self.steps is None else self.steps[has_token],
            complete=None if self.complete is None else self.complete[has_token],
            places=self.positions[mask] if is_cut or self.places is not None else None,
        )

    def of_usable_tokens(self, usable: Mask) -> "Sequences | None":
        """`of_tokens` of the usable ones [T]; a response with a token that is not usable is no longer complete."""
        remaining_sequences = self.of_tokens(usable)
        if remaining_sequences is None or usable.all():
            return remaining_sequences
        is_complete = self.sum_by_sequence(~usable) == 0
        complete = is_complete if self.complete is None else is_complete & self.complete
        return replace(remaining_sequences, complete=complete[self.sum_by_sequence(usable) > 0])

    @property
    def num_sequences(self) -> int:
        return int(self.offsets.size - 1)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def num_clusters(self) -> int:
        return int(self.cluster_index.max()) + 1

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sequence [N]."""
        return np.diff(self.offsets)

    @cached_property
    def cluster_index(self) -> Ints:
        """Number of each sequence's cluster, from 0 without gaps [N]."""
        return np.unique(self.clusters, return_inverse=True)[1]

    @cached_property
    def positions(self) -> npt.NDArray[np.int32]:
        """Position of each token in its response, from 0 [T]."""
        if self.places is not None:
            return self.places.astype(np.int32)
        return np.arange(self.num_tokens, dtype=np.int32) - np.repeat(self.offsets[:-1], self.lengths).astype(np.int32)

    def neighbours(self, shift: int) -> tuple[Ints, Ints]:
        """The flat indices of tokens and of the tokens `shift` places after them in the response, where both exist."""
        if self.places is None:
            position = self.positions + shift
            indices = np.flatnonzero((position >= 0) & (position < self.spread(self.lengths)))
            return indices, indices + shift
        row_size = int(self.positions.max()) + 1 + abs(shift)
        keys = self.spread(np.arange(self.num_sequences) * row_size) + self.positions
        neighbours = np.searchsorted(keys, keys + shift)
        inside = np.flatnonzero((self.positions + shift >= 0) & (neighbours < keys.size))
        indices = inside[keys[neighbours[inside]] == keys[inside] + shift]
        return indices, neighbours[indices]

    def spread(self, values: Array) -> Array:
        """Repeat a value of each sequence for its tokens: [N] -> [T]."""
        return np.repeat(values, self.lengths)

    def sum_by_sequence(self, values: Array) -> Floats:
        """Sum token values by sequence: [T] -> [N]; of a mask, count the true entries."""
        dtype = np.int64 if values.dtype == np.bool_ else np.float64
        return np.add.reduceat(values, self.offsets[:-1], dtype=dtype).astype(np.float64)

    def sum_by_cluster(self, values: Array) -> Floats:
        """Sum sequence values by cluster: [N] -> [G], in the order of the cluster numbers."""
        totals = np.bincount(self.cluster_index, weights=values.astype(np.float64), minlength=self.num_clusters)
        return totals.astype(np.float64, copy=False)


@dataclass(frozen=True)
class Repeat:
    """Tokens that one side scored twice, with one difference between the computations: natural log-probs [T].

    `sequences` lays out these tokens alone.

    Raises:
        ValueError: an array has another length, is not finite, or lacks a log-prob.
    """

    sequences: Sequences
    first: Reals
    second: Reals

    def __post_init__(self) -> None:
        for values in (self.first, self.second):
            if values.shape != (self.sequences.num_tokens,) or not is_usable(values).all():
                raise ValueError(f"a repeated leg must hold {self.sequences.num_tokens} finite log-probs")

    @property
    def diff(self) -> Floats:
        """Second less first [T], nats."""
        return difference(self.second, self.first)


@dataclass(frozen=True)
class TokenPair:
    """The same sampled tokens under both policies: natural log-probs [T], finite and at most 0 up to rounding.

    The caller leaves out, counts and names rows with missing or non-finite log-probs.

    Raises:
        ValueError: an array has another length, is not finite, or cannot be log-probs; nothing is dropped here.
    """

    sequences: Sequences
    log_pi: Reals
    log_mu: Reals
    log_ref: Reals | None = None
    """The high-precision reference."""
    top1_pi: Ints | None = None
    top1_mu: Ints | None = None
    entropy_pi: Reals | None = None
    """The entropy of pi's next-token distribution, nats."""
    log_mu_prefill: Reals | None = None
    """mu again, by prefill of the same ids."""
    log_ref_rounded_pi: Reals | None = None
    log_ref_rounded_mu: Reals | None = None
    """FP32 arithmetic on weights rounded to the dtype of that side."""
    log_ref_fp32: Reals | None = None
    log_ref_fp64: Reals | None = None
    """The reference in both formats, where a run measures what rounding in FP32 does to the checkpoint."""
    repeats: Mapping[str, Repeat] = field(default_factory=dict)
    """Tokens that a side computed twice, to measure a floor; a key starts with `pi_` or `mu_` (`pi_other_batch`)."""
    clip: float | None = None
    """abs(d) was limited to so many nats."""

    def __post_init__(self) -> None:
        for name, values in self._legs.items():
            if values.shape != (self.sequences.num_tokens,):
                raise ValueError(f"{name} has shape {values.shape}; there are {self.sequences.num_tokens} tokens")
            if np.issubdtype(values.dtype, np.floating):
                if not np.isfinite(values).all():
                    raise ValueError(f"{name} holds NaN or infinity; leave those rows out, and count them")
                if is_missing(values).any():
                    raise ValueError(f"{name} lacks log-probs; leave those rows out, and count them")
                if name.startswith("log_") and values.max() > MOST_ROUNDED_UP:
                    raise ValueError(f"{name} reaches {values.max():.3g}, which is no natural log-probability")

    def of_tokens(self, mask: Mask) -> "TokenPair | None":
        """The pair on some of its tokens [T], without `repeats`; None without a chosen token."""
        sequences = self.sequences.of_tokens(mask)
        if sequences is None:
            return None
        legs: dict[str, Any] = {name: leg[mask] for name, leg in self._legs.items()}
        return replace(self, sequences=sequences, repeats={}, **legs)

    @cached_property
    def of_whole_responses(self) -> "TokenPair | None":
        """The pair on its complete responses, since S needs all tokens; None where there is none."""
        complete = self.sequences.complete
        if complete is None or complete.all():
            return self
        complete_pair = self.of_tokens(self.sequences.spread(complete))
        return (
            None
            if complete_pair is None
            else replace(complete_pair, sequences=replace(complete_pair.sequences, complete=None))
        )

    @property
    def _legs(self) -> dict[str, Array]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    @cached_property
    def diff(self) -> Floats:
        """d = log pi - log mu [T], nats."""
        return difference(self.log_pi, self.log_mu)

    @cached_property
    def abs_diff(self) -> Floats:
        return np.abs(self.diff)

    @cached_property
    def prob_pi(self) -> Floats:
        return probability(self.log_pi)

    @cached_property
    def prob_mu(self) -> Floats:
        return probability(self.log_mu)

    @property
    def prob_diff(self) -> Floats:
        """Probability under pi minus that under mu [T]."""
        return self.prob_pi - self.prob_mu

    @cached_property
    def diff_sums(self) -> Floats:
        """S = sum of d over each sequence [N], nats."""
        return self.sequences.sum_by_sequence(self.diff)


def rows_of(values: Array, offsets: Ints) -> list[Array]:
    """The values [T] of each row, `values[offsets[i]:offsets[i + 1]]`, without a copy."""
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def difference(first: Reals, second: Reals) -> Floats:
    """first - second in float64 [T]."""
    return np.subtract(first, second, dtype=np.float64)


def probability(log_probs: Reals) -> Floats:
    """e^x in float64 [T]."""
    return np.asarray(np.exp(log_probs, dtype=np.float64))


def common_length(first: Ints, second: Ints) -> int:
    """How many ids two sequences [S] and [T] begin with that are equal."""
    length = min(first.size, second.size)
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length
