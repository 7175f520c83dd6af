"""What a forward pass is given: whose weights, which rotary frequencies, and the context of every response."""

from dataclasses import dataclass

from mismatch_probe.config.explain import KnownWeights
from mismatch_probe.explain.tokens import LoggedTokens


@dataclass(frozen=True)
class Rope:
    """Another RoPE base, as a multiple of the checkpoint's, and positions divided by a factor (linear scaling)."""

    base_times: float = 1.0
    positions_divided_by: float = 1.0


@dataclass(frozen=True)
class StaleCache:
    """Keys and values of prompts that other weights computed, in whole blocks of so many tokens."""

    weights: KnownWeights
    block: int

    def num_cached(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are not computed again; its last one always is."""
        return (len(prompt) - 1) // self.block * self.block


@dataclass(frozen=True)
class Context:
    """What stands before each of R responses, and by how much its positions are shifted. `name` tells it apart.

    cache: what was kept of the prompts from before.
    """

    name: str
    prompts: list[list[int]]
    response_shift: list[int]
    cache: StaleCache | None = None

    @classmethod
    def as_logged(cls, tokens: LoggedTokens) -> "Context":
        return cls.of("as logged", [sequence.prompt_token_ids for sequence in tokens.sequences])

    @classmethod
    def of(cls, name: str, prompts: list[list[int]]) -> "Context":
        return cls(name, prompts, [0] * len(prompts))


@dataclass(frozen=True)
class WeightsPlan:
    """Which weights each of R responses has; None is the checkpoint that the log is explained with."""

    of_rows: tuple[KnownWeights | None, ...]

    @property
    def different(self) -> list[KnownWeights | None]:
        return list(dict.fromkeys(self.of_rows))


@dataclass(frozen=True)
class Setup:
    """A forward pass of every response."""

    weights: WeightsPlan
    rope: Rope | None
    context: Context

    def passes(self) -> list["PassKey"]:
        """The passes of one model each that it takes."""
        return [PassKey(weights, self.rope, self.context.name) for weights in self.weights.different]


@dataclass(frozen=True)
class PassKey:
    weights: KnownWeights | None
    rope: Rope | None
    context: str
