"""How often the guards on the mismatch are wrong where a step has few responses, and how soon they are right.

    mismatch-probe compare --model demo --prompts sums:terms=3 --num-prompts 256 --samples-per-prompt 4 \
        --max-new-tokens 40 --dtype bf16 --reference none --out runs/pool
    python -m benchmarks.small_steps runs/pool [--runs 100] > TABLE

A policy that does not move: every step draws its prompts, each with all of its responses, both sides' log-probs and
the entropies, from those that the comparison measured. From step 21 on of a faulty run d is a multiple of what it was,
as in a coarser format, or pi takes another temperature for its own tokens. The default guards that read nothing but a
step's tokens judge through the code that `train` runs.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pyarrow.parquet as pq

from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.stats.sequences import Floats

PROMPTS: Final = {"1 x 4": 1, "2 x 4": 2, "8 x 4": 8, "16 x 4": 16}
"""Of a step, each with all of its responses."""
STEPS: Final = 30
ONSET: Final = 21
FAULTY_STEPS: Final = 40
"""After the onset."""


@dataclass(frozen=True)
class Response:
    """Log-probs of both sides and pi's entropy [T], nats."""

    log_pi: Floats
    log_mu: Floats
    entropy: Floats


Fault = Callable[[Response], Response]


def coarser(times: float) -> Fault:
    """d is so many times what it was."""
    return lambda sound: Response(sound.log_mu + times * (sound.log_pi - sound.log_mu), sound.log_mu, sound.entropy)


def hotter(temperature: float) -> Fault:
    """pi's log-probs follow its own at another temperature, to first order: log pi + (1/T - 1) (log pi + H)."""
    change = 1 / temperature - 1
    return lambda sound: Response(
        np.minimum(0, sound.log_pi + change * (sound.log_pi + sound.entropy)), sound.log_mu, sound.entropy
    )


FAULTS: Final[dict[str, tuple[Fault, str]]] = {
    "d times 15": (coarser(15), "mismatch-floor"),
    "d times 30": (coarser(30), "mismatch-floor"),
    "d times 60": (coarser(60), "mismatch-floor"),
    "temperature 0.7": (hotter(0.7), "temperature"),
    "temperature 1.5": (hotter(1.5), "temperature"),
}


def measured(run: Path) -> list[list[Response]]:
    """The responses of a comparison in BF16, by prompts."""
    pi, mu = (pq.read_table(run / "legs" / f"{leg}.parquet").to_pydict() for leg in ("train-bf16", "infer-bf16-decode"))
    of_mu = dict(zip(mu["id"], mu["logprobs"], strict=True))
    prompts: dict[str, list[Response]] = {}
    for name, log_pi, entropy in zip(pi["id"], pi["logprobs"], pi["entropy_nats"], strict=True):
        response = Response(np.array(log_pi, float), np.array(of_mu[name], float), np.array(entropy, float))
        prompts.setdefault(name.rpartition("/")[0], []).append(response)
    return list(prompts.values())


def step(pool: list[list[Response]], size: int, random: np.random.Generator, fault: Fault | None) -> Metrics:
    rows = random.integers(0, len(pool), size)
    drawn = [response for row in rows for response in pool[row]]
    drawn = drawn if fault is None else [fault(response) for response in drawn]
    columns = zip(*((each.log_pi, each.log_mu, each.entropy) for each in drawn), strict=True)
    log_pi, log_mu, entropy = map(list, columns)
    prompts = [place for place, row in enumerate(rows) for _ in pool[row]]
    return Batch(log_pi, log_mu, entropy=entropy, prompt_ids=prompts).measure().metrics()


def firings(
    pool: list[list[Response]], size: int, seed: int, steps: int, fault: Fault | None = None
) -> dict[str, list[int]]:
    """The steps at which each guard fired; a fault from `ONSET` on."""
    random = np.random.default_rng([seed, size])
    metrics = step(pool, size, random, None)
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if set(guard.metrics) <= metrics.keys()))
    book.observe_canary(metrics)
    fired: dict[str, list[int]] = {}
    for number in range(1, steps + 1):
        if number > 1:
            metrics = step(pool, size, random, fault if number >= ONSET else None)
        for event in book.evaluate(number, metrics).events:
            fired.setdefault(event.guard, []).append(number)
    return fired


def wrong(pool: list[list[Response]], size: int, runs: int) -> str:
    """Of clean runs: those in which each guard fired."""
    counts = Counter(guard for seed in range(runs) for guard in firings(pool, size, seed, STEPS))
    return ", ".join(f"{guard} {count}" for guard, count in counts.most_common()) or "none"


def delay(pool: list[list[Response]], size: int, runs: int, fault: Fault, guard: str) -> str:
    """Steps to the first firing after the onset, median, and the share of runs with one."""
    fired = [firings(pool, size, seed, ONSET + FAULTY_STEPS - 1, fault).get(guard, []) for seed in range(runs)]
    after = [min(late) - ONSET + 1 for steps in fired if (late := [number for number in steps if number >= ONSET])]
    return f"{median(after):.0f}, {100 * len(after) / runs:.0f} %" if after else "not seen"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    pool = measured(options.run)
    print(f"| | {' | '.join(PROMPTS)} |", "|---|" + "---|" * len(PROMPTS), sep="\n")
    cells = [wrong(pool, size, options.runs) for size in PROMPTS.values()]
    print(f"| clean, of {options.runs} runs of {STEPS} steps | {' | '.join(cells)} |", flush=True)
    for name, (fault, guard) in FAULTS.items():
        cells = [delay(pool, size, max(1, options.runs // 10), fault, guard) for size in PROMPTS.values()]
        print(f"| {name}, `{guard}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
