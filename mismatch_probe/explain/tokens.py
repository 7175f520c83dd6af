"""A log's responses as flat arrays, and which of their log-probs count."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.config.explain import LoggedSide
from mismatch_probe.errors import UsageError
from mismatch_probe.records.logged import LoggedResponse
from mismatch_probe.records.sequences import TokenSequence

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

SIDES: Final[tuple[LoggedSide, ...]] = ("mu", "pi")


@dataclass(frozen=True)
class LoggedTokens:
    """R responses in the log's order, their T tokens one after another; log-probs in nats.

    rows: the response of each token [T]. places: each token's place in its response [T]. sampled [T]: by the policy.
    temperature [T]: the log's, NaN where it says none. columns: the logged log-probs [T] of each side that has any.
    """

    responses: Sequence[LoggedResponse]
    sequences: list[TokenSequence]
    lengths: Ints
    rows: Ints
    places: Ints
    sampled: Bools
    temperature: Floats
    columns: dict[LoggedSide, Floats]

    @classmethod
    def of(cls, responses: Sequence[LoggedResponse]) -> "LoggedTokens":
        """Responses without a token are left out.

        Raises:
            UsageError: no response has a token, or no column of log-probs is there.
        """
        kept = [response for response in responses if len(response.token_ids)]
        if not kept:
            raise UsageError("the log cannot be explained: not one of its responses has a token; give one that has")
        lengths = np.array([len(response.token_ids) for response in kept])
        columns: dict[LoggedSide, Floats] = {
            side: np.concatenate([_column(response, side) for response in kept])
            for side in SIDES
            if any(getattr(response, f"log_{side}") is not None for response in kept)
        }
        if not columns:
            raise UsageError(
                "the log cannot be explained: it has log-probs of neither side; give one with the sampler's or the "
                "trainer's"
            )
        return cls(
            responses=kept,
            sequences=[
                TokenSequence(response.where, response.prompt_token_ids.tolist(), response.token_ids.tolist())
                for response in kept
            ],
            lengths=lengths,
            rows=np.repeat(np.arange(len(kept)), lengths),
            places=np.concatenate([np.arange(length) for length in lengths]),
            sampled=np.concatenate([np.asarray(response.sampled, dtype=np.bool_) for response in kept]),
            temperature=np.repeat(
                [np.nan if response.temperature is None else response.temperature for response in kept], lengths
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
    logged = response.log_mu if side == "mu" else response.log_pi
    return np.full(len(response.token_ids), np.nan) if logged is None else np.asarray(logged, dtype=np.float64)
