"""Responses of a log side by side: their columns one after another, so that a check looks at all of them at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.sequences import Floats, Ints, Mask, of_sampled_tokens

TOKENS_OF_A_BLOCK: Final = 2**17
RESPONSES_OF_A_BLOCK: Final = 4096


@dataclass(frozen=True)
class Block:
    """N responses, one or more, with T tokens together, of which S were sampled."""

    responses: Sequence[LoggedResponse]

    def by_step(self) -> Iterator[tuple[int | None, "Block"]]:
        """The responses of each step, in the order of the log."""
        steps: dict[int | None, list[LoggedResponse]] = {}
        for response in self.responses:
            steps.setdefault(response.step, []).append(response)
        if len(steps) == 1:
            yield next(iter(steps)), self
            return
        for step, responses in steps.items():
            yield step, Block(responses)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each response [N]."""
        return np.asarray([response.token_ids.size for response in self.responses], dtype=np.int64)

    @cached_property
    def rows(self) -> Ints:
        """The response that each token is of [T]."""
        return np.repeat(np.arange(len(self.responses)), self.lengths)

    @cached_property
    def sampled(self) -> Mask:
        """[T]."""
        return np.concatenate([response.sampled for response in self.responses])

    @cached_property
    def rows_of_sampled(self) -> Ints:
        """The response that each sampled token is of [S]."""
        return self.rows[self.sampled]

    @cached_property
    def num_sampled(self) -> Ints:
        """Sampled tokens of each response [N]."""
        return self.count(np.ones(self.rows_of_sampled.size, dtype=np.bool_))

    @cached_property
    def is_greedy(self) -> Mask:
        """Responses that were sampled at temperature 0 [N]."""
        return np.asarray([response.temperature == 0 for response in self.responses])

    @cached_property
    def token_ids(self) -> Ints:
        """[T]."""
        return np.concatenate([response.token_ids for response in self.responses])

    @cached_property
    def log_mu(self) -> Floats:
        """The sampler's log-probs [T], NaN where there is none or none that a sampled token can have."""
        return of_sampled_tokens(self.column("log_mu"))

    def has(self, name: str) -> Mask:
        """Responses that have a column [N]."""
        return self._there[name]

    def column(self, name: str) -> Floats:
        """A column as it was logged [T], NaN where a response has none."""
        return self._columns[name]

    def of_sampled(self, name: str) -> Floats:
        """The same of the sampled tokens [S]."""
        return self._of_sampled[name]

    def count(self, chosen: Mask) -> Ints:
        """Sampled tokens [S] that are chosen, of each response [N]."""
        return np.bincount(self.rows_of_sampled[chosen], minlength=len(self.responses))

    @cached_property
    def _there(self) -> dict[str, Mask]:
        return {
            name: np.asarray([getattr(response, name) is not None for response in self.responses]) for name in _COLUMNS
        }

    @cached_property
    def _columns(self) -> dict[str, Floats]:
        return {name: self._flat(name) for name in _COLUMNS}

    @cached_property
    def _of_sampled(self) -> dict[str, Floats]:
        return {name: values[self.sampled] for name, values in self._columns.items()}

    def _flat(self, name: str) -> Floats:
        there = self._there[name]
        if not there.any():
            return np.full(self.rows.size, np.nan)
        values: npt.NDArray[np.float64] = np.concatenate(
            [
                np.full(response.token_ids.size, np.nan) if values is None else values
                for response in self.responses
                for values in (getattr(response, name),)
            ],
            dtype=np.float64,
        )
        return values


_COLUMNS: Final = ("log_mu", "log_pi", "log_ref", "entropy_nats")
