"""Whether the columns of a log are in nats, and of a vocabulary: sums that can be added up."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.logs.checks.columns import Block
from mismatch_probe.logs.findings import Level, LogCode, LogFinding
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.stats.bases import (
    LARGEST_VOCABULARY,
    EntropySums,
    OtherBase,
    SideSums,
    are_no_samples,
    moments,
    most_entropy,
)
from mismatch_probe.stats.sequences import Floats, is_usable

_UNSURE_ABOVE: Final = 0.5
_ROUNDING: Final = 0.05
"""Nats: BF16 knows 12 nats to that."""
_COLUMNS: Final = {
    "log_pi": "the trainer's log-probs",
    "log_mu": "the sampler's log-probs",
    "both": "the log-probs of both sides",
    "entropy": "the entropies",
}


@dataclass
class UnitSums:
    """Over sampled tokens: of pi's entropies, of both sides, and moments of -log mu. highest_entropy: and where."""

    entropies: EntropySums = field(default_factory=EntropySums)
    sides: SideSums = field(default_factory=SideSums)
    surprisal: Floats = field(default_factory=lambda: np.zeros(3))
    highest_entropy: float = 0.0
    highest_at: str = ""

    def add(self, block: Block) -> None:
        log_mu, log_pi, entropy = (
            block.log_mu[block.sampled],
            block.of_sampled("log_pi"),
            block.of_sampled("entropy_nats"),
        )
        has_mu, has_pi = is_usable(log_mu), is_usable(log_pi)
        self.surprisal = self.surprisal + moments(-log_mu[has_mu])
        both = has_mu & has_pi
        if both.any():
            self.sides = self.sides + SideSums.of(log_pi[both], log_mu[both])
        usable = has_pi & np.isfinite(entropy)
        if not usable.any():
            return
        self.entropies = self.entropies + EntropySums.of(log_pi[usable], entropy[usable], _UNSURE_ABOVE)
        highest = int(np.where(usable, entropy, -np.inf).argmax())
        if entropy[highest] > self.highest_entropy:
            self.highest_entropy = float(entropy[highest])
            self.highest_at = block.responses[block.rows_of_sampled[highest]].where

    def __iadd__(self, other: Self) -> Self:
        if other.highest_entropy > self.highest_entropy:
            self.highest_entropy, self.highest_at = other.highest_entropy, other.highest_at
        self.entropies = self.entropies + other.entropies
        self.sides = self.sides + other.sides
        self.surprisal = self.surprisal + other.surprisal
        return self


def unit_findings(sums: UnitSums, vocabulary_size: int | None) -> Iterator[LogFinding]:
    """What is to be told of the units of entropies and of the sampler's log-probs."""
    of = f"of {write_count(vocabulary_size or LARGEST_VOCABULARY)} tokens"
    most = most_entropy(vocabulary_size)
    base = sums.sides.base or sums.entropies.base
    if sums.highest_entropy > most + _ROUNDING:
        yield LogFinding(
            code=LogCode.BEYOND_VOCABULARY,
            sentence=(
                f"the entropies reach {write_number(sums.highest_entropy)}, first in {sums.highest_at}, and a "
                f"vocabulary {of} has {write_number(most)} nats at most: they are in other units, or sums"
            ),
            level=Level.WARNING,
            column="entropy_nats",
            evidence={"highest": sums.highest_entropy, "most": most},
        )
        base = sums.sides.base
    if base is not None:
        yield _in_base(base)
    if are_no_samples(sums.surprisal, vocabulary_size):
        mean = -float(sums.surprisal[1] / sums.surprisal[0])
        yield LogFinding(
            code=LogCode.BEYOND_VOCABULARY,
            sentence=(
                f"the sampler's log-probs are {write_number(mean)} on average, and tokens that are "
                f"drawn from a vocabulary {of} have -{write_number(most)} at least: they are those of other tokens, or "
                "no natural log-probs"
            ),
            level=Level.WARNING,
            column="log_mu",
            evidence={"mean": mean, "most": most},
        )


def _in_base(base: OtherBase) -> LogFinding:
    return LogFinding(
        code=LogCode.OTHER_BASE,
        sentence=(
            f"{_COLUMNS[base.column]} look like logarithms to {base.name}: write natural ones, that are these times "
            f"ln {base.base} = {base.nats:.4f}"
        ),
        level=Level.WARNING,
        column={"both": None, "entropy": "entropy_nats"}.get(base.column, base.column),
        evidence={"base": base.base},
    )
