"""One question, asked again and again: while the weights stay, so does its answer."""

from collections.abc import Mapping
from typing import Any, Final

from mismatch_probe.engines.server.answers import Candidates, Question
from mismatch_probe.engines.server.client import Client
from mismatch_probe.errors import EngineError

_TOP: Final = 5
_TIMES_ITS_NOISE: Final = 10.0
_LEAST_MOVE: Final = 0.05
"""Nats by which an answer may move: so many times the server's own noise, and this in any case. Among other requests a
server in 16 bit rounds otherwise, and a likely token's log-prob moves by hundredths.
"""


class StandingQuestion:
    """Sees weights that change without a label; a small step of training changes less than it can see."""

    def __init__(self, client: Client, prompt: list[int], own_noise: float) -> None:
        """own_noise: nats by which the server's log-probs move of themselves."""
        self._client = client
        self._question = Question(prompt, 1, seed=0, ignore_eos=True, top=_TOP)
        self._bearable = max(_LEAST_MOVE, _TIMES_ITS_NOISE * own_noise)
        self._answer = self._ask()

    @property
    def answer(self) -> dict[str, float]:
        """Log-probs (nats) of the likeliest tokens by their ids, as JSON has them."""
        return {str(token_id): value for token_id, value in self._answer.items()}

    def check(self) -> None:
        """Ask again.

        Raises:
            EngineError: the answer is another than at the beginning, or cannot be had.
        """
        self._compare(self._answer, self._ask(), "than when it was first asked")

    def require(self, recorded: Mapping[str, Any]) -> None:
        """
        Raises:
            EngineError: an earlier process was answered otherwise.
        """
        before = {int(token_id): float(value) for token_id, value in recorded.items()}
        self._compare(before, self._answer, "than the run was begun with")

    def _compare(self, before: Candidates, now: Candidates, when: str) -> None:
        moved = max((abs(before[token_id] - now[token_id]) for token_id in before.keys() & now.keys()), default=None)
        if moved is not None and moved <= self._bearable:
            return
        by = "with other tokens" if moved is None else f"by {moved:.2g} nats"
        raise EngineError(
            f"the server at {self._client.url} answers the same question otherwise {when} ({by}, where its own noise "
            f"allows {self._bearable:.2g}): it holds other weights now, and its responses would be of two policies; "
            "bring it back to the first weights and continue with --resume, or give another --out"
        )

    def _ask(self) -> Candidates:
        return self._client.ask(self._question).candidates[0]
