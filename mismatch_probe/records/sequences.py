"""The token sequences that pass between stages: what was asked, what was sampled, what was scored."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt whose ids are fixed once and are the same on every leg. where: it was read from, `line 3 of FILE`."""

    prompt_id: str
    token_ids: list[int]
    text: str
    answer: str | None = None
    where: str | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """How a sentence names it."""
        return prompt_label(self.prompt_id, self.where)


def prompt_label(prompt_id: str, where: str | None) -> str:
    """`prompt row-2 (line 3 of FILE)`."""
    return f"prompt {prompt_id}" + (f" ({where})" if where else "")


@dataclass(frozen=True)
class SampleRequest:
    id: str
    prompt: EncodedPrompt
    seed: int


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and a response as ids; log-probs are always those of `token_ids`, never of the prompt."""

    id: str
    prompt_token_ids: list[int]
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


@dataclass(frozen=True)
class ScoredSequence:
    """Log-probs (nats, shape [T]) of one response's tokens under one policy.

    `top1_ids` [T] is the arg-max token before each position; `entropy_nats` [T] the entropy of the next-token
    distribution. NaN marks a log-prob the engine did not deliver: it is counted and named later, never averaged.
    `start_logprobs` are those of the prompt's second and following tokens, where the start of the context is seen.
    """

    id: str
    logprobs: FloatArray
    top1_ids: IntArray | None = None
    entropy_nats: FloatArray | None = None
    start_logprobs: FloatArray | None = None


@dataclass(frozen=True)
class SampledSequence:
    """One response sampled from mu with the log-probs the engine returned while decoding."""

    sequence: TokenSequence
    scores: ScoredSequence
    finish_reason: str
    token_texts: list[str]
