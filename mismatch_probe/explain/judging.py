"""How well a column of log-probs is explained, in units of rounding, over the tokens that count.

The loss of a token is the negative log-likelihood of Student's t with four degrees of freedom, whose scale is the
rounding floor at the predicted log-prob: about the square of a small residual, and little more for a huge one than for
a large one, so that no single token decides. Tokens of one response are not independent, so two accounts are compared
by the sums of whole responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special

from mismatch_probe.config.model import LoggedSide
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import KeptSets, LoggedResponse, TokenSequence
from mismatch_probe.stats.rounding import Floor, trimmed_mean
from mismatch_probe.stats.sequences import Ints

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SIDES: Final[tuple[LoggedSide, ...]] = ("mu", "pi")


@dataclass(frozen=True)
class LoggedTokens:
    """R responses in the log's order, their T tokens one after another; log-probs in nats."""

    responses: Sequence[LoggedResponse]
    sequences: list[TokenSequence]
    lengths: Ints
    rows: Ints
    """The response of each token [T]."""
    places: Ints
    """Each token's place in its response [T]."""
    sampled: Bools
    """Whether the policy sampled it [T]."""
    temperature: Floats
    """The log's, NaN where it says none [T]."""
    columns: dict[LoggedSide, Floats]
    """The logged log-probs [T] of each side that has any."""

    @classmethod
    def of(cls, responses: Sequence[LoggedResponse]) -> "LoggedTokens":
        """Responses without a token are left out.

        Raises:
            UsageError: no response has a token, or no column of log-probs is there.
        """
        nonempty = [response for response in responses if len(response.token_ids)]
        if not nonempty:
            raise UsageError("the log cannot be explained: not one of its responses has a token; give one that has")
        lengths = np.array([len(response.token_ids) for response in nonempty])
        columns: dict[LoggedSide, Floats] = {
            side: np.concatenate([_column(response, side) for response in nonempty])
            for side in SIDES
            if any(getattr(response, f"log_{side}") is not None for response in nonempty)
        }
        if not columns:
            raise UsageError(
                "the log cannot be explained: it has log-probs of neither side; give one with the engine's or the "
                "training path's"
            )
        return cls(
            responses=nonempty,
            sequences=[
                TokenSequence(response.where, response.prompt_token_ids.tolist(), response.token_ids.tolist())
                for response in nonempty
            ],
            lengths=lengths,
            rows=np.repeat(np.arange(len(nonempty)), lengths),
            places=np.concatenate([np.arange(length) for length in lengths]),
            sampled=np.concatenate([np.asarray(response.sampled, dtype=np.bool_) for response in nonempty]),
            temperature=np.repeat(
                [np.nan if response.temperature is None else response.temperature for response in nonempty], lengths
            ).astype(np.float64),
            columns=columns,
        )

    @property
    def num_responses(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> Ints:
        """Where each response's tokens begin [R]."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    @cached_property
    def sets(self) -> KeptSets | None:
        """What each token was drawn from [T], where the log records that; an empty set is the whole vocabulary."""
        of_rows = [
            (response.kept, length)
            if response.kept is not None and response.kept.ends.size == length
            else (KeptSets(np.zeros(0, np.int32), np.zeros(length, np.int64)), length)
            for response, length in zip(self.responses, self.lengths.tolist(), strict=True)
        ]
        ids = np.concatenate([kept.ids for kept, _ in of_rows])
        sizes = np.concatenate([kept.sizes for kept, _ in of_rows])
        return KeptSets(ids, np.cumsum(sizes)) if ids.size else None

    def of_row(self, row: int) -> slice:
        """The tokens of a response."""
        return slice(int(self.starts[row]), int(self.starts[row] + self.lengths[row]))

    @cached_property
    def halves(self) -> Bools:
        """Which half of the log each token is in [T]; responses of one group, or to one prompt, are in the same."""
        if self.num_responses < 2:
            return np.asarray(self.places % 2 == 1)
        keys = [
            response.group if response.group is not None else tuple(response.prompt_token_ids.tolist())
            for response in self.responses
        ]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        of_rows = np.array([numbers[key] for key in keys]) if len(numbers) > 1 else np.arange(self.num_responses)
        return np.asarray(of_rows[self.rows] % 2 == 1)


def _column(response: LoggedResponse, side: LoggedSide) -> Floats:
    values = response.log_mu if side == "mu" else response.log_pi
    return np.full(len(response.token_ids), np.nan) if values is None else np.asarray(values, dtype=np.float64)


_FREEDOM: Final = 4.0
_LEAST_BLOCKS: Final = 8
_LEAST_PIECES: Final = 32
FARTHEST_NATS: Final = 100.0


@dataclass(frozen=True)
class Account:
    """What a hypothesis says of every token: its log-prob [T], NaN where it says nothing, and how well it is known [T].

    Both in nats; `unit` is the rounding floor.
    """

    prediction: Floats
    unit: Floats


@dataclass(frozen=True)
class Judge:
    """One side's column [T] (nats), what was rounded off as it was written, each token's response, and what counts."""

    column: Floats
    resolution: Floats
    rows: Ints
    is_counted: Bools

    def account(self, prediction: Floats, floor: Floor, unit_times: float = 1.0) -> Account:
        """The prediction with the floor at it, times what a sharper distribution makes of it."""
        return Account(prediction, np.hypot(floor.at(prediction) * unit_times, self.resolution))

    def residual(self, account: Account) -> Floats:
        """In nats [T], NaN where nothing counts or nothing is predicted."""
        with np.errstate(invalid="ignore"):
            nats = np.clip(self.column - account.prediction, -FARTHEST_NATS, FARTHEST_NATS)
        return np.asarray(np.where(self.is_counted, nats, np.nan))

    def loss(self, account: Account) -> Floats:
        """Of each token [T], NaN as `residual`."""
        squares = (self.residual(account) / account.unit) ** 2
        return np.asarray((_FREEDOM + 1) / 2 * np.log1p(squares / _FREEDOM) + np.log(account.unit))

    def floors(self, account: Account) -> float:
        """Root mean square of the residuals in units, without the largest hundredth."""
        units = self.residual(account) / account.unit
        return float(np.sqrt(trimmed_mean(units[np.isfinite(units)] ** 2)))

    def nats(self, account: Account) -> float:
        """Root mean square of the residuals in nats."""
        residual = self.residual(account)
        return float(np.sqrt(np.mean(residual[np.isfinite(residual)] ** 2)))

    def explained_share(self, account: Account, null: Account) -> float:
        """Share of the null's square (nats) that `account` takes away, on tokens that both speak of; -1 at worst."""
        ours, theirs = self.residual(account), self.residual(null)
        both = np.isfinite(ours) & np.isfinite(theirs)
        null_square = trimmed_mean(theirs[both] ** 2)
        return max(-1.0, 1 - trimmed_mean(ours[both] ** 2) / null_square) if null_square > 0 else 0.0

    def same(self, account: Account, other: Account) -> bool:
        """Whether both say the same of every token."""
        ours, theirs = (np.stack([side.prediction, side.unit]) for side in (account, other))
        return np.array_equal(ours, theirs, equal_nan=True)

    def standard_scores(self, better: Account, worse: Account) -> float:
        """By how many standard errors `better` has the smaller loss; 0 where both say the same.

        Responses of which both say the same are left out; of few that are left, pieces are compared. Of the sum of
        their gains or of the signed ranks [Wilcoxon 1945], whichever tells more: one response with a large gain makes
        the sum's error as large as itself.
        """
        gains = self.loss(worse) - self.loss(better)
        differs = np.isfinite(gains) & (gains != 0)
        if not differs.any():
            return 0.0
        _, blocks = np.unique(self.rows[differs], return_inverse=True)
        if blocks.max() + 1 < _LEAST_BLOCKS:
            blocks = np.arange(differs.sum()) * _LEAST_BLOCKS // int(differs.sum())
        sums = np.bincount(blocks, weights=gains[differs]).astype(np.float64)
        spread = float(np.sqrt(np.sum((sums - sums.mean()) ** 2) * len(sums) / max(len(sums) - 1, 1)))
        total = float(sums.sum())
        of_sum = total / spread if spread > 0 else float(np.sign(total))
        return max(of_sum, _of_ranks(sums)) if total > 0 else of_sum

    def drawn_to(self, account: Account, null: Account) -> float:
        """By how many standard errors the null's residuals point to where `account` is; 0 where both say the same.

        The score test [Rao 1948] of the line from the null, which is right at 0, to `account` at 1. It sees an account
        that moves every token by far less than rounding does, whose likelihood is hardly better than the null's: the
        tokens need not each be nearer to it. Pieces of responses are compared by Student's t, which is turned into the
        normal score of the same probability: of their sums, or of what each says in units of its own error, whichever
        tells more, for what is moved most in a few responses makes the error of the sums as large as they are.
        """
        units = np.where(np.isfinite(self.residual(account)), self.residual(null) / null.unit, np.nan)
        shift = (account.prediction - null.prediction) / null.unit
        usable = np.isfinite(units) & np.isfinite(shift) & (shift != 0)
        if usable.sum() < 2:
            return 0.0
        pulls = ((_FREEDOM + 1) * units / (_FREEDOM + units**2) * shift)[usable]
        pieces = self._pieces(usable)
        sums, squares = (
            np.bincount(pieces, weights=values).astype(np.float64) for values in (pulls, shift[usable] ** 2)
        )
        return max(_normal_score(sums), _normal_score(sums / np.sqrt(squares)))

    def _pieces(self, usable: Bools) -> Ints:
        """The number of each usable token's piece; every response is cut into as many as make _LEAST_PIECES of all."""
        _, rows, lengths = np.unique(self.rows[usable], return_inverse=True, return_counts=True)
        each = -(-_LEAST_PIECES // len(lengths))
        places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.asarray(np.unique(rows * each + places * each // lengths[rows], return_inverse=True)[1])


def _normal_score(values: Floats) -> float:
    """Of the mean of some values by Student's t; 0 where all are equal."""
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
    if error == 0:
        return 0.0
    return float(-special.ndtri(special.stdtr(len(values) - 1, -float(values.mean()) / error)))


def _of_ranks(gains: Floats) -> float:
    """Standard score of the sum of the signed ranks of some gains."""
    _, places, counts = np.unique(np.abs(gains), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float(np.sum(np.sign(gains) * ranks) / np.sqrt(np.sum(ranks**2)))


_OFF_FLOORS: Final = 4.0
_AGREES_FLOORS: Final = 2.0
_LEAST_AGREEING: Final = 0.25
_MOST_CORRELATION: Final = 0.25
_LEAST_TOKENS: Final = 8
_LEAST_OFF: Final = 2


@dataclass(frozen=True)
class Unrelated:
    """How many of the responses, and the correlation of their log-probs with what their tokens should have."""

    num_off: int
    num_responses: int
    correlation: float


def find_unrelated(tokens: LoggedTokens, judge: Judge, null: Account) -> Unrelated | None:
    """None where responses are off by degrees, where hardly any agrees, or where log-probs do follow the tokens."""
    units = np.abs(judge.residual(null)) / null.unit
    off, agreeing = [], 0
    for row in range(tokens.num_responses):
        ours = units[tokens.of_row(row)]
        finite = ours[np.isfinite(ours)]
        if len(finite) < _LEAST_TOKENS:
            continue
        typical = float(np.median(finite))
        if typical > _OFF_FLOORS:
            off.append(row)
        elif typical <= _AGREES_FLOORS:
            agreeing += 1
        else:
            return None
    if len(off) < _LEAST_OFF or agreeing < _LEAST_AGREEING * (agreeing + len(off)):
        return None
    is_off = np.isin(tokens.rows, off) & np.isfinite(units)
    correlation = float(np.corrcoef(judge.column[is_off], null.prediction[is_off])[0, 1])
    if not abs(correlation) <= _MOST_CORRELATION:
        return None
    return Unrelated(len(off), tokens.num_responses, correlation)
