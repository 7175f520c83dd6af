"""Responses of a real model with both log-probs of each token, to draw logs from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

Floats = np.ndarray


@dataclass(frozen=True)
class Response:
    """One response: ids of prompt and response, mu and pi of each of its tokens in nats (NaN: not recorded)."""

    prompt: list[int]
    ids: list[int]
    mu: Floats
    pi: Floats
    mask: list[int] | None = None
    extra: dict[str, object] = field(default_factory=dict)
    """Columns of the plain format."""

    @property
    def places(self) -> Floats:
        """The place of each token in prompt and response, from 0."""
        return len(self.prompt) + np.arange(len(self.ids))

    def cut(self, length: int) -> "Response":
        return replace(self, ids=self.ids[:length], mu=self.mu[:length], pi=self.pi[:length])

    def with_extra(self, **extra: object) -> "Response":
        return replace(self, extra={**self.extra, **extra})


Log = list[Response]


def read_run(run: Path) -> Log:
    """The responses of a comparison in BF16: what vLLM recorded as it sampled, and what the training path computed."""
    legs = {"mu": "infer-bf16-decode", "pi": "train-bf16"}
    sides = {
        side: {
            row["id"]: np.array(row["logprobs"])
            for row in parquet.read_table(run / "legs" / f"{leg}.parquet").to_pylist()
        }
        for side, leg in legs.items()
    }
    return [
        Response(row["prompt_token_ids"], row["token_ids"], sides["mu"][row["id"]], sides["pi"][row["id"]])
        for row in parquet.read_table(run / "rollouts.parquet").to_pylist()
    ]


def by_prompt(pool: Log) -> list[Log]:
    """The responses to each prompt."""
    groups: dict[tuple[int, ...], Log] = {}
    for response in pool:
        groups.setdefault(tuple(response.prompt), []).append(response)
    return list(groups.values())


def some(random: np.random.Generator, pool: Log, count: int) -> Log:
    """So many different responses."""
    return [pool[i] for i in random.permutation(len(pool))[:count]]


def pick(random: np.random.Generator, values: Sequence[int]) -> int:
    return int(values[int(random.integers(len(values)))])
