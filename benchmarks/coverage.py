"""How often the intervals of `stats` hold the truth, by simulation with clustered, heavy-tailed tokens.

    python benchmarks/coverage.py [--repeats 1000] [--sequences 64 256] [--processes 2]

Each design draws sequences of many lengths whose tokens share a scale; the truth is the estimate from 40,000 sequences
(so its own error is far below an interval's width at 256). Printed: the percentage of 95 % intervals that hold it.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pool

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.bins import PositionGrid, log_ends
from mismatch_probe.stats.blame import blame
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.stats.spread import fit_spread

Vector = npt.NDArray[np.float64]
TRUTH_SEQUENCES = 40_000
TRUTH_BATCHES = 8

METRICS = (
    "abs_logprob_diff",
    "abs_logprob_diff_seq",
    "abs_logprob_diff_p50",
    "abs_logprob_diff_p99",
    "logprob_diff_rms",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "token_mult_prob_error",
    "prob_abs_diff",
    "prob_abs_diff_std",
    "prob_pearson",
    "chi2_token",
    "log_ppl_diff",
    "ppl_ratio",
    "is_ratio_mean_token",
    "ess_token",
    "outside_band_0.9_1.1",
    "kl_k2_seq",
    "ess_seq",
)
BLAME = ("rms_error_pi", "error_correlation", "share_pi")
SPREAD = ("coefficient", "exponent", "budget")
EFFECTIVE_SHARE = 0.5


@dataclass(frozen=True)
class Design:
    """noise: unit-scale token noise; spread: sd of the log scale between sequences; lengths: sd of the log length."""

    name: str
    noise: Callable[[np.random.Generator, int], Vector]
    spread: float
    lengths: float
    growth: float = 0.0


def _laplace(random: np.random.Generator, size: int) -> Vector:
    return random.laplace(size=size)


def _student(random: np.random.Generator, size: int) -> Vector:
    return random.standard_t(5, size)


def _mixture(random: np.random.Generator, size: int) -> Vector:
    return np.asarray(random.laplace(size=size) * np.where(random.random(size) < 0.01, 8.0, 1.0))


def _log_normal_scale(random: np.random.Generator, size: int) -> Vector:
    return np.asarray(random.normal(size=size) * np.exp(random.normal(0, 0.8, size)))


DESIGNS = (
    Design("student", _student, 0.3, 0.5),
    Design("laplace, grows with length", _laplace, 0.3, 0.5, growth=0.25),
    Design("1 % of tokens 8x", _mixture, 0.3, 0.5),
    Design("log-normal token scale", _log_normal_scale, 0.3, 0.5),
    Design("student, unlike sequences", _student, 0.5, 0.8),
)


def draw(
    design: Design, num_sequences: int, random: np.random.Generator, noise: np.random.Generator | None = None
) -> TokenPair:
    """d and both sides' errors share each sequence's scale; half of the tokens are as likely as any is here.

    noise: draws the errors, `random` the sequences; two calls with an equal `random` are of the same tokens.
    """
    lengths = np.clip(random.lognormal(5, design.lengths, num_sequences), 10, 2000).astype(np.int64)
    sequences = Sequences.of_lengths(lengths)
    scale = 0.01 * np.exp(random.normal(0, design.spread, num_sequences)) * (lengths / 150) ** design.growth
    log_ref = -3.0 - random.exponential(0.5, sequences.num_tokens) * (random.random(sequences.num_tokens) < 0.5)
    sides = [np.repeat(scale, lengths) * design.noise(noise or random, sequences.num_tokens) for _ in range(2)]
    return TokenPair(sequences, log_ref + sides[0], log_ref + 0.5 * sides[1], log_ref)


def estimates(pair: TokenPair) -> dict[str, Estimate | None]:
    metrics, _ = pair_metrics(pair)
    sides = blame(pair)
    grid = PositionGrid(pair.sequences, np.array(log_ends(int(pair.sequences.lengths.max()))))
    spread = fit_spread(Estimator(pair.sequences), grid, grid.sums(pair.diff), grid.sums(pair.diff**2), EFFECTIVE_SHARE)
    return (
        {name: metrics[name] for name in METRICS}
        | {name: getattr(sides, name) for name in BLAME}
        | {f"spread {name}": getattr(spread, name) for name in SPREAD}
    )


def misses(task: tuple[int, int, int, dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Whether each truth lies below, and above, one sample's interval; NaN where the sample gives none."""
    number, num_sequences, repeat, truths = task
    found = estimates(draw(DESIGNS[number], num_sequences, np.random.default_rng([99, number, num_sequences, repeat])))
    sides = dict.fromkeys(truths, (math.nan, math.nan))
    for name, estimate in found.items():
        if estimate is not None and estimate.low is not None and estimate.high is not None:
            sides[name] = (truths[name] < estimate.low, truths[name] > estimate.high)
    return sides


def truth(number: int) -> dict[str, float]:
    batches = [
        estimates(draw(DESIGNS[number], TRUTH_SEQUENCES // TRUTH_BATCHES, np.random.default_rng([number, batch])))
        for batch in range(TRUTH_BATCHES)
    ]
    values: dict[str, list[float]] = {name: [] for name in batches[0]}
    for batch in batches:
        for name, estimate in batch.items():
            assert estimate is not None, name
            values[name].append(estimate.value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    for number, design in enumerate(DESIGNS):
        print(
            f"{design.name:<32}" + "".join(f"{n:>8} seq. (below, above)      " for n in arguments.sequences), flush=True
        )
        truths = truth(number)
        sides = {}
        with Pool(arguments.processes) as pool:
            for n in arguments.sequences:
                tasks = [(number, n, repeat, truths) for repeat in range(arguments.repeats)]
                sides[n] = pool.map(misses, tasks, chunksize=16)
        for name in truths:
            cells = ""
            for n in arguments.sequences:
                of_samples = np.array([sample[name] for sample in sides[n]])
                below, above = 100 * np.nanmean(of_samples, axis=0)
                none = 100 * np.isnan(of_samples).mean()
                note = f"none: {none:.1f} %" if none else ""
                cells += f"{100 - below - above:>10.1f} ({below:>4.1f}, {above:>4.1f}) {note:<14}"
            print(f"  {name:<30}{cells}", flush=True)


if __name__ == "__main__":
    main()
