"""How often a limit passes that rare large errors break: gatings of samples whose truth is an integral.

    python -m benchmarks.gate_tails [--repeats 200] [--designs 0 1 2] [--all-looks]

256 sequences at one look, of 64 prompts four times and of 256. Each metric has the limit where its truth is 0.8, 0.9, 1
and 1.15 times the limit. Printed, in percent of gatings: failed / inconclusive / passed, and in brackets how many
of the inconclusive ones the interval alone would have passed.

With --all-looks, the gate that `init gate` writes: `abs_logprob_diff` alone, 64 prompts at the first look, and twice as
many at each next one while it is undecided. In brackets: how many are decided at the first look.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from multiprocessing import Pool

import numpy as np

from benchmarks.tails import CLIP, TailDesign, Vector, draw, expectation, mean_length
from mismatch_probe.gate.config import GateSettings, parse_gate
from mismatch_probe.gate.decide import decide
from mismatch_probe.gate.measure import Evidence, Measurer
from mismatch_probe.records.answers import CheckAnswer
from mismatch_probe.stats.sequences import Sequences, TokenPair

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
ONE_LOOK = {"min_sequences": SEQUENCES, "max_sequences": SEQUENCES}
OVER_LIMIT = (0.8, 0.9, 1.0, 1.15)
STARTED = "abs_logprob_diff"
"""The metric of the gate that `init gate` writes."""
OVER_STARTED = (0.44, 0.8, 0.95, 1.0, 1.15, 1.3, 2.0)
"""The first is that of a pretrained model in BF16 (`reports/real`)."""
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
    expectations = {name: expectation(design, terms, CLIP) for name, terms in TERMS.items()}
    return {**expectations, "kl_k2_seq": mean_length() * expectations["kl_k2"]}


def gated(design: TailDesign, shape: tuple[int, int], truth: dict[str, float], repeat: int) -> dict[Key, Outcome]:
    pair = draw(design, *shape, np.random.default_rng([23, *shape, repeat]))
    measurer = Measurer({("bf16", "bf16"): Evidence(pair, SEQUENCES)})
    answers: dict[Key, Outcome] = {}
    for metric, true in truth.items():
        for over in OVER_LIMIT:
            check = {"metric": metric, "clip": CLIP, "max": LEAST.get(metric, 0.0) + true / over}
            gate = parse_gate({"gate": {**ONE_LOOK, "check": [check]}}, "a plan")
            [judged] = decide(gate, measurer).checks
            answers[metric, over] = judged.answer, judged.tail_is_open
    return answers


def gated_at_all_looks(design: TailDesign, truth: float, repeat: int) -> dict[Key, Outcome]:
    """The answers, and whether each was found at the first look."""
    most = GateSettings().max_sequences
    pair = draw(design, most, 1, np.random.default_rng([29, repeat]))
    sizes = pair.sequences.lengths.cumsum()
    answers: dict[Key, Outcome] = {}

    @cache
    def measurer(size: int) -> Measurer:
        sequences = Sequences.of_lengths(pair.sequences.lengths[:size], pair.sequences.clusters[:size])
        tokens = slice(sizes[size - 1])
        evidence = Evidence(TokenPair(sequences, pair.log_pi[tokens], pair.log_mu[tokens]), size)
        return Measurer({("bf16", "bf16"): evidence})

    for over in OVER_STARTED:
        gate = parse_gate({"gate": {"check": [{"metric": STARTED, "max": truth / over}]}}, "a plan")
        looks = gate.settings.looks
        for look in looks:
            answer = decide(gate, measurer(look)).answer
            answers[STARTED, over] = answer, look == looks[0] and answer != "inconclusive"
            if answer != "inconclusive":
                break
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--designs", type=int, nargs="+", default=list(range(len(DESIGNS))))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--all-looks", action="store_true")
    options = parser.parse_args()
    over_limit = OVER_STARTED if options.all_looks else OVER_LIMIT
    heads = ("tokens and prompts", "sample", "limit on", *(f"truth at {over:g}x the limit" for over in over_limit))
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    with Pool(options.processes) as pool:
        for design in (DESIGNS[number] for number in options.designs):
            truth = truths(design)
            if options.all_looks:
                gate = partial(gated_at_all_looks, design, expectation(design, np.abs, CLIP))
                _show(design, "64 to 1,024", [STARTED], over_limit, pool.imap_unordered(gate, range(options.repeats)))
                continue
            for shape in SHAPES:
                gatings = pool.imap_unordered(partial(gated, design, shape, truth), range(options.repeats))
                _show(design, f"{shape[0]} x {shape[1]}", truth, over_limit, gatings)


def _show(
    design: TailDesign,
    sample: str,
    metrics: Iterable[str],
    over_limit: Sequence[float],
    gatings: Iterable[dict[Key, Outcome]],
) -> None:
    answers: dict[Key, Counter[Outcome]] = {}
    for gating in gatings:
        for key, answer in gating.items():
            answers.setdefault(key, Counter())[answer] += 1
    for metric in metrics:
        cells = [_cell(answers[metric, over]) for over in over_limit]
        print("| " + " | ".join((design.name, sample, metric, *cells)) + " |", flush=True)


def _cell(counts: Counter[Outcome]) -> str:
    """Each answer's share, and that of the outcomes that are marked."""
    shares: dict[CheckAnswer, float] = {"fail": 0.0, "inconclusive": 0.0, "pass": 0.0}
    marked = 0
    for (answer, is_marked), count in counts.items():
        shares[answer] += 100 * count / counts.total()
        marked += count * is_marked
    return f"{' / '.join(f'{share:.1f}' for share in shares.values())} ({100 * marked / counts.total():.1f})"


if __name__ == "__main__":
    main()
