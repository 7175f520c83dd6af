"""What a server is asked and what it answers, what a protocol must offer to carry both, and a question that is
repeated, whose answer changes only if the weights do.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import EngineError
from mismatch_probe.stats.sequences import is_missing

Candidates = dict[int, float]
"""Log-probs (nats) of a few tokens at one position, by their ids."""


_BYTES_OF_THE_REST: Final = 2**20
_BYTES_OF_AN_ENTRY: Final = 1024
"""Of one log-prob with its token's id and text; a server writes a tenth of it."""
_BYTES_OF_AN_ID: Final = 32


class NoAnswer(Exception):  # noqa: N818 - what came is not an answer
    """What came is no answer of this protocol; the text says why."""


@dataclass(frozen=True)
class Question:
    """One request."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    top: int = 1
    """The number of candidates at each position besides the sampled token."""
    count: int = 1
    """Responses to the prompt."""
    cache_salt: str | None = None
    """What the prefix cache holds under another salt is not read."""
    prefill: bool = False
    """Whether the log-probs of the prompt's own tokens are wanted too."""
    messages: tuple[tuple[str, str], ...] = ()
    """Role and content of each message of the conversation, where the server is to apply its own chat template."""

    @property
    def sampling(self) -> dict[str, Any]:
        """How to sample, in vLLM's words."""
        return {
            **NEUTRAL,
            "n": self.count,
            "max_tokens": self.max_tokens,
            "min_tokens": 0,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stop": [],
        }


def most_bytes(question: Question) -> int:
    """The most bytes that an answer to it can have as JSON: several times what servers write."""
    num_sampled_entries = question.max_tokens * (question.top + 2)
    of_prompt = len(question.prompt_ids) * (_BYTES_OF_AN_ID + (3 * _BYTES_OF_AN_ENTRY if question.prefill else 0))
    return _BYTES_OF_THE_REST + question.count * (num_sampled_entries * _BYTES_OF_AN_ENTRY + of_prompt)


@dataclass(frozen=True)
class ServerAnswer:
    """One response."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    """[T] (nats), NaN where the server gives none."""
    candidates: list[Candidates]
    """[T], the sampled token among them."""
    finish_reason: str
    """`stop` or `length`; a response with another reason is refused."""
    prompt_ids: list[int] | None = None
    """As the server echoes them; None where it does not."""
    prompt_candidates: list[Candidates | None] | None = None
    """Of each prompt token; None where the server gives none."""
    versions: tuple[str, ...] = ()
    """Labels of the weights that sampled it, in order; empty where the server has none."""
    text: str | None = None
    """Of a server that gives text alone: then `token_ids` is empty."""


def member(content: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """`content[name]`.

    Raises:
        NoAnswer: it is missing, or of another kind.
    """
    if not isinstance(content, dict) or name not in content:
        raise NoAnswer(f"it has no {name}")
    if not isinstance(content[name], kind) or (isinstance(content[name], bool) and kind is int):
        raise NoAnswer(f"its {name} is no {getattr(kind, '__name__', 'such value')}")
    return content[name]


def whole_numbers(values: Any, name: str) -> list[int]:
    """Token ids.

    Raises:
        NoAnswer: something else is among them.
    """
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise NoAnswer(f"its {name} are no token ids")
    return values


def log_prob(value: Any) -> float:
    """A log-prob, NaN where it is missing (null, NaN, or vLLM's floor).

    Raises:
        NoAnswer: it is no number.
    """
    if value is None:
        return float("nan")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise NoAnswer("a log-prob is no number")
    return float("nan") if is_missing(np.asarray([value], dtype=np.float64))[0] else float(value)


def as_logprobs(values: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Log-probs [T] in nats, NaN where one is missing. Raises as `log_prob`."""
    return np.asarray([log_prob(value) for value in values], dtype=np.float32)


def versions_of(spans: Any) -> tuple[str, ...]:
    """The names in a list of spans, each a table or a list that begins with its version."""
    names = []
    for span in spans if isinstance(spans, list) else []:
        version = (
            span.get("version") if isinstance(span, dict) else span[0] if isinstance(span, list) and span else None
        )
        if version is not None:
            names.append(str(version))
    return tuple(dict.fromkeys(names))


NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [],
}
"""Sent with every request: what is left out, a server fills in from its own settings or the checkpoint's."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports of itself before it is asked anything, at paths that not all servers have."""

    model: Mapping[str, Any]
    """Its entry of the model that is asked, in `/v1/models`."""
    model_info: Mapping[str, Any]
    """`/model_info`, or `/get_model_info` where that has nothing: SGLang's."""
    server_info: Mapping[str, Any]
    """`/server_info`: vLLM's with VLLM_SERVER_DEV_MODE=1, and SGLang's."""
    version: str | None
    """`/version`: vLLM's."""


class ServerProtocol(Protocol):
    """How a kind of server is asked and answers; a package brings one in the entry points
    `mismatch_probe.server_protocols`, under the name that a side's `protocol` gives.

        class Mine(ServerProtocol):
            path: ClassVar[str] = "/generate_ids"

            def recognises(self, facts: ServerFacts) -> bool:
                return "my_server" in facts.model_info

            def body(self, question: Question, model: str) -> dict[str, Any]:
                return {"ids": question.prompt_ids, "temperature": question.temperature, ...}

            def answers(self, content: Any) -> list[ServerAnswer]:
                return [ServerAnswer(whole_numbers(content["ids"], "ids"), as_logprobs(content["logprobs"]), ...)]
    """

    path: ClassVar[str]
    """Of the endpoint, below the server's address."""
    server: ClassVar[str] = ""
    """Whose kind of server it is, such as vLLM, as a sentence names it; empty where only the protocol has a name."""

    def recognises(self, facts: ServerFacts) -> bool:
        """Whether a server that has the endpoint speaks this protocol: True unless several kinds share the path."""
        return True

    def software(self, facts: ServerFacts) -> str | None:
        """The server's software with its version where its facts show that it is the one of this protocol."""
        return None

    def dtype(self, facts: ServerFacts) -> str | None:
        """The dtype that the server's facts name, in the spelling of PyTorch; None where they name none."""
        return None

    @abstractmethod
    def body(self, question: Question, model: str) -> dict[str, Any]:
        """The request as JSON values; every sampling parameter is in it."""

    @abstractmethod
    def answers(self, content: Any) -> list[ServerAnswer]:
        """The responses, as many as were asked for.

        Raises:
            NoAnswer: it is none of this protocol.
        """


_CANDIDATES: Final = 5
TIMES_ITS_NOISE: Final = 10.0
LEAST_MOVE: Final = 0.05
"""Nats by which an answer may move: so many times the server's own noise, and this in any case. Among other requests a
server in 16 bit rounds otherwise, and a likely token's log-prob moves by hundredths.
"""


class StandingQuestion:
    """Sees weights that change without a label; a small step of training changes less than it can see."""

    def __init__(
        self, ask: Callable[[Question], ServerAnswer], url: str, advice: str, prompt: list[int], own_noise: float
    ) -> None:
        """
        Args:
            ask: asks the server at `url`.
            advice: what to do where its weights change, as the end of a sentence.
            prompt: token ids.
            own_noise: nats by which the server's log-probs move of themselves.
        """
        self._send = ask
        self._url = url
        self._advice = advice
        self._question = Question(prompt, 1, seed=0, ignore_eos=True, top=_CANDIDATES)
        self._bearable = max(LEAST_MOVE, TIMES_ITS_NOISE * own_noise)
        self._answer = self._ask_for_candidates()

    @property
    def answer(self) -> dict[str, float]:
        """Log-probs (nats) of the likeliest tokens by their ids, as JSON has them."""
        return {str(token_id): value for token_id, value in self._answer.items()}

    def renew(self) -> None:
        """The server was sent other weights: its answer is another from now on."""
        self._answer = self._ask_for_candidates()

    def check(self) -> None:
        """Ask again.

        Raises:
            EngineError: the answer is another than at the beginning, or cannot be had.
        """
        self._require("than when it was first asked", self._answer, self._ask_for_candidates())

    def require(self, record: Mapping[str, Any]) -> None:
        """
        Raises:
            EngineError: an earlier process was answered otherwise.
        """
        old = {int(token_id): float(value) for token_id, value in record.items()}
        self._require("than the run was begun with", old, self._answer)

    def _require(self, when: str, old: Candidates, new: Candidates) -> None:
        change = other_answer(old, new, self._bearable)
        if change is not None:
            raise EngineError(
                f"the server at {self._url} answers the same question otherwise {when} ({change}): it holds "
                f"other weights now, and its responses would be of two policies; {self._advice}"
            )

    def _ask_for_candidates(self) -> Candidates:
        """What is given, of what is asked for."""
        candidates = self._send(self._question).candidates[0]
        return {token_id: value for token_id, value in candidates.items() if isfinite(value)}


def other_answer(old: Candidates, new: Candidates, bearable: float) -> str | None:
    """How `new` departs from `old` by more than `bearable` nats; None where it does not, or one of them is empty."""
    if not old or not new:
        return None
    change = max((abs(old[token_id] - new[token_id]) for token_id in old.keys() & new.keys()), default=None)
    if change is None:
        return "with other tokens"
    return None if change <= bearable else f"by {change:.2g} nats, where its own noise allows {bearable:.2g}"
