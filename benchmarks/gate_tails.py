"""How often a limit passes that rare large errors break: gatings of samples whose truth is an integral.

    python -m benchmarks.gate_tails [--repeats 200] [--designs 0 1 2]

256 sequences at one look, of 64 prompts four times and of 256. Each metric has the limit where its truth is 0.8, 0.9, 1
and 1.15 times the limit. Printed, in percent of gatings: failed / inconclusive / passed, and in brackets how many
of the inconclusive ones the interval alone would have passed.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import Pool

import numpy as np

from benchmarks.tails import CLIP, TailDesign, Vector, draw, expectation, mean_length
from mismatch_probe.gate.config import parse_gate
from mismatch_probe.gate.decide import decide
from mismatch_probe.gate.measure import Evidence, Measurer
from mismatch_probe.records.gate_result import CheckAnswer

DESIGNS = (
    TailDesign(math.inf, 0.1),
    TailDesign(math.inf, 0.1, "log-normal"),
    TailDesign(math.inf, 0.1, "log-normal", between=1.0),
    TailDesign(math.inf, 0.1, "a tenth at 3x"),
    TailDesign(5, 0.01),
    TailDesign(5, 0.1, "log-normal"),
    TailDesign(3, 0.01),
    TailDesign(3, 0.03, "log-normal"),
    TailDesign(3, 0.1, "a tenth at 3x"),
)
SHAPES = ((64, 4), (256, 1))
"""Prompts, and samples of each."""
SEQUENCES = 256
OVER_LIMIT = (0.8, 0.9, 1.0, 1.15)
BAND = (math.log(0.9), math.log(1.1))
TERMS: dict[str, Callable[[Vector], Vector]] = {
    "abs_logprob_diff": np.abs,
    "kl_k2": lambda d: d**2 / 2,
    "kl_k3": lambda d: np.expm1(d) - d,
    "token_mult_prob_error": lambda d: np.expm1(np.abs(d)),
    "outside_band_0.9_1.1": lambda d: ((d < BAND[0]) | (d > BAND[1])).astype(np.float64),
}
LEAST = {"token_mult_prob_error": 1.0}

Key = tuple[str, float]
Outcome = tuple[CheckAnswer, bool]
"""The answer, and whether the tail alone holds a pass back."""


def truths(design: TailDesign) -> dict[str, float]:
    """Of each metric, less the least that it can be; S is a sum of independent d, so that E S^2 = E T E d^2."""
    found = {name: expectation(design, terms, CLIP) for name, terms in TERMS.items()}
    return {**found, "kl_k2_seq": mean_length() * found["kl_k2"]}


def gated(design: TailDesign, shape: tuple[int, int], truth: dict[str, float], repeat: int) -> dict[Key, Outcome]:
    pair = draw(design, *shape, np.random.default_rng([23, *shape, repeat]))
    measurer = Measurer({("bf16", "bf16"): Evidence(pair, SEQUENCES)})
    answers: dict[Key, Outcome] = {}
    for metric, true in truth.items():
        for over in OVER_LIMIT:
            check = {"metric": metric, "clip": CLIP, "max": LEAST.get(metric, 0.0) + true / over}
            gate = parse_gate({"gate": {"max_sequences": SEQUENCES, "check": [check]}}, "a plan")
            [judged] = decide(gate, measurer).checks
            answers[metric, over] = judged.answer, judged.tail_is_open
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--designs", type=int, nargs="+", default=list(range(len(DESIGNS))))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    heads = ("tokens and prompts", "sample", "limit on", *(f"truth at {over:g}x the limit" for over in OVER_LIMIT))
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    with Pool(options.processes) as pool:
        for design in (DESIGNS[number] for number in options.designs):
            truth = truths(design)
            for shape in SHAPES:
                answers: dict[Key, Counter[Outcome]] = {}
                for gating in pool.imap_unordered(partial(gated, design, shape, truth), range(options.repeats)):
                    for key, answer in gating.items():
                        answers.setdefault(key, Counter())[answer] += 1
                for metric in truth:
                    cells = [_cell(answers[metric, over]) for over in OVER_LIMIT]
                    row = (design.name, f"{shape[0]} x {shape[1]}", metric, *cells)
                    print("| " + " | ".join(row) + " |", flush=True)


def _cell(counts: Counter[Outcome]) -> str:
    shares: dict[CheckAnswer, float] = {"fail": 0.0, "inconclusive": 0.0, "pass": 0.0}
    for (answer, _), count in counts.items():
        shares[answer] += 100 * count / counts.total()
    held_back = 100 * counts["inconclusive", True] / counts.total()
    return f"{' / '.join(f'{share:.1f}' for share in shares.values())} ({held_back:.1f})"


if __name__ == "__main__":
    main()
