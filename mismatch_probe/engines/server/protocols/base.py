"""How one kind of server is asked: where, with what body, and how its answer is read."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from mismatch_probe.engines.server.answers import Answer, Question

NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [],
}
"""Sent with every request: what is left out, a server fills in from its own settings or the checkpoint's."""


class Protocol(ABC):
    """name: as a side's `protocol` gives it. path: of the endpoint, below the server's address."""

    name: ClassVar[str]
    path: ClassVar[str]

    @abstractmethod
    def body(self, question: Question, model: str) -> dict[str, Any]:
        """The request as JSON values; every sampling parameter is in it."""

    @abstractmethod
    def answers(self, content: Any) -> list[Answer]:
        """The responses, as many as were asked for.

        Raises:
            NoAnswer: it is none of this protocol.
        """
