"""After how many steps the guard `sampling` sees settings that an engine applies and hides, and how often it is wrong.

    python -m benchmarks.hidden_sampling [--runs 20] > TABLE

The guard reads log pi and the entropy of each token alone, so these are simulated: tokens are drawn from random
distributions of a given mean entropy, as they are or under a hidden temperature or top-p, and the default guard judges
each step through the code that `train` runs.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.departure_totals import SurpriseTotals
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.stats.sequences import Floats

VOCABULARY = 30
SHARPNESS = (6, 13, 35, 120)
"""Of the distributions: standard deviations of their logits."""
TOKENS = (512, 4096)
CLEAN_STEPS = 300
LONGEST = 150
"""Steps after which a hidden setting counts as not seen."""


@dataclass(frozen=True)
class Hidden:
    """What the engine samples with beyond what it says."""

    temperature: float = 1.0
    top_p: float = 1.0

    def applied(self, log_pi: Floats) -> Floats:
        """What tokens are drawn from [T, V]."""
        drawn = np.exp(log_pi / self.temperature)
        drawn /= drawn.sum(axis=1, keepdims=True)
        if self.top_p == 1:
            return drawn
        order = np.argsort(-drawn, axis=1)
        sorted_ = np.take_along_axis(drawn, order, axis=1)
        kept = np.where(sorted_.cumsum(axis=1) - sorted_ < self.top_p, sorted_, 0.0)
        np.put_along_axis(drawn, order, kept / kept.sum(axis=1, keepdims=True), axis=1)
        return drawn


HIDDEN = {"temperature 0.8": Hidden(temperature=0.8), "top-p 0.9": Hidden(top_p=0.9), "greedy": Hidden(top_p=1e-9)}


def first_firing(hidden: Hidden, tokens: int, sharpness: float, steps: int, seed: int) -> int | None:
    """The step at which the guard fires; None where it does not."""
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "sampling"))
    for step, totals in enumerate(_steps(hidden, tokens, sharpness, steps, np.random.default_rng(seed)), start=1):
        if book.evaluate(step, {"mismatch/surprise_mean": totals.mean, "mismatch/surprise_error": totals.error}).events:
            return step
    return None


def _steps(
    hidden: Hidden, tokens: int, sharpness: float, steps: int, random: np.random.Generator
) -> Iterator[SurpriseTotals]:
    for _ in range(steps):
        logits = sharpness * random.standard_normal((tokens, VOCABULARY))
        logits -= logits.max(axis=1, keepdims=True)
        log_pi = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chosen = (hidden.applied(log_pi).cumsum(axis=1) > random.random((tokens, 1))).argmax(axis=1)
        entropy = -(np.exp(log_pi) * log_pi).sum(axis=1)
        yield SurpriseTotals.of(log_pi[np.arange(tokens), chosen], entropy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    print(
        f"| mean entropy, nats | tokens a step | {' | '.join(HIDDEN)} | false, of {runs} runs of {CLEAN_STEPS} steps |"
    )
    print("|---|---|" + "---|" * (len(HIDDEN) + 1))
    for sharpness in SHARPNESS:
        sample = list(_steps(Hidden(), max(TOKENS), sharpness, 10, np.random.default_rng(0)))
        entropy = sum(totals.entropies for totals in sample) / sum(totals.tokens for totals in sample)
        for tokens in TOKENS:
            seen = [
                _range([first_firing(hidden, tokens, sharpness, LONGEST, seed) for seed in range(max(1, runs // 4))])
                for hidden in HIDDEN.values()
            ]
            clean = CLEAN_STEPS if tokens == min(TOKENS) else CLEAN_STEPS // 8
            wrong = sum(first_firing(Hidden(), tokens, sharpness, clean, seed) is not None for seed in range(runs))
            cell = f"{wrong}" if clean == CLEAN_STEPS else f"{wrong} ({clean} steps)"
            print(f"| {entropy:.2f} | {tokens} | {' | '.join(seen)} | {cell} |", flush=True)


def _range(steps: list[int | None]) -> str:
    """Of the steps at which it fired, least and most."""
    fired = [step for step in steps if step is not None]
    if not fired:
        return f"not in {LONGEST}"
    most = str(max(fired)) if len(fired) == len(steps) else f"not in {LONGEST}"
    return most if most == str(min(fired)) else f"{min(fired)} to {most}"


if __name__ == "__main__":
    main()
