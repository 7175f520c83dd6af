"""What a forward pass is given: the weights' rotary frequencies, and the context of every response."""

from dataclasses import dataclass

from mismatch_probe.explain.tokens import LoggedTokens


@dataclass(frozen=True)
class Rope:
    """Another RoPE base, as a multiple of the checkpoint's, and positions divided by a factor (linear scaling)."""

    base_times: float = 1.0
    positions_divided_by: float = 1.0


@dataclass(frozen=True)
class Context:
    """What stands before each of R responses, and by how much its positions are shifted. `name` tells it apart."""

    name: str
    prompts: list[list[int]]
    response_shift: list[int]

    @classmethod
    def as_logged(cls, tokens: LoggedTokens) -> "Context":
        return cls.of("as logged", [one.prompt_token_ids for one in tokens.sequences])

    @classmethod
    def of(cls, name: str, prompts: list[list[int]]) -> "Context":
        return cls(name, prompts, [0] * len(prompts))
