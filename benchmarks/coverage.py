"""How often the intervals of `stats` hold the truth, by simulation with clustered, heavy-tailed tokens.

    python -m benchmarks.coverage [tokens] [few-prompts] [heavy-weights] [tails] [--repeats 1000] [--designs 0 1 2 3 4]

`tokens`: sequences of many lengths whose heavy-tailed tokens share a scale, one a prompt, 64 and 256 of them.
`few-prompts`: the same where prompts have a scale of their own too, as many samples of few prompts. The truth of both
is the estimate from 40,000 prompts (so its own error is far below an interval's width). `heavy-weights`: log-normal
weights of sequences, whose effective share is known exactly. `tails`: k3 of tokens whose rare large errors decide it,
against an integral, and whether what misses it is marked. Printed: the percentage of 95 % intervals that hold the
truth, and how often it lies below and above them; of the length budgets also of those without the mark ‡ alone.
"""

import argparse
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool

import numpy as np
import numpy.typing as npt

from benchmarks.tails import CLIP, TailDesign, expectation
from benchmarks.tails import draw as draw_tail
from mismatch_probe.stats.bins import PositionGrid, log_ends
from mismatch_probe.stats.estimator import Estimator, blame
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.stats.spread import Errors, fit_spread

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
BUDGET = "spread budget"
EFFECTIVE_SHARE = 0.5


@dataclass(frozen=True)
class Design:
    """noise: unit-scale token noise; spread, prompts: sd of the log scale between the sequences of a prompt and between
    prompts; lengths: sd of the log length; samples: of each prompt.
    """

    name: str
    noise: Callable[[np.random.Generator, int], Vector]
    spread: float
    lengths: float
    growth: float = 0.0
    prompts: float = 0.0
    samples: int = 1


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

UNLIKE_PROMPTS = Design("unlike prompts", _student, 0.3, 0.5, prompts=0.5)
SHAPES = ((8, 1), (8, 8), (8, 32), (32, 32), (64, 4))
"""Prompts, and samples of each."""

HEAVY_SHAPES = ((64, 1), (256, 1), (8, 8), (8, 1), (32, 8))
TRUE_SHARES = (0.5, 0.3)
HEAVY_LENGTH = 96

TAIL_DESIGNS = (
    TailDesign(math.inf, 0.1),
    TailDesign(math.inf, 0.1, "a tenth at 3x"),
    TailDesign(5, 0.01),
    TailDesign(3, 0.01),
    TailDesign(3, 0.03, "log-normal"),
    TailDesign(3, 0.1),
)
TAIL_SHAPES = ((64, 4), (256, 1))


def draw(
    design: Design, num_sequences: int, random: np.random.Generator, noise: np.random.Generator | None = None
) -> TokenPair:
    """d and both sides' errors share each sequence's scale; half of the tokens are as likely as any is here.

    noise: draws the errors, `random` the sequences; two calls with an equal `random` are of the same tokens.
    """
    lengths = np.clip(random.lognormal(5, design.lengths, num_sequences), 10, 2000).astype(np.int64)
    prompts = np.arange(num_sequences) // design.samples
    sequences = Sequences.of_lengths(lengths, prompts)
    scale = 0.01 * np.exp(random.normal(0, design.spread, num_sequences)) * (lengths / 150) ** design.growth
    if design.prompts:
        scale *= np.exp(random.normal(0, design.prompts, prompts[-1] + 1))[prompts]
    log_ref = -3.0 - random.exponential(0.5, sequences.num_tokens) * (random.random(sequences.num_tokens) < 0.5)
    sides = [np.repeat(scale, lengths) * design.noise(noise or random, sequences.num_tokens) for _ in range(2)]
    return TokenPair(sequences, log_ref + sides[0], log_ref + 0.5 * sides[1], log_ref)


def estimates(pair: TokenPair) -> dict[str, Estimate | None]:
    metrics, _ = pair_metrics(pair, names=METRICS)
    sides = blame(pair)
    grid = PositionGrid(pair.sequences, np.array(log_ends(int(pair.sequences.lengths.max()))))
    spread = fit_spread(Estimator(pair.sequences), grid, Errors.of(grid, pair.diff), EFFECTIVE_SHARE)
    return (
        {name: metrics[name] for name in METRICS}
        | {name: getattr(sides, name) for name in BLAME}
        | {f"spread {name}": getattr(spread, name) for name in SPREAD}
    )


Sides = dict[str, tuple[float, float]]
"""Whether each truth lies below, and above, one sample's interval; NaN where the sample gives none."""


def misses(design: Design, num_sequences: int, truths: dict[str, float], seed: Sequence[int]) -> Sides:
    pair = draw(design, num_sequences, np.random.default_rng(seed))
    estimated = estimates(pair)
    is_marked = length_law(pair, EFFECTIVE_SHARE).budget_tail_is_open
    unmarked = None if is_marked else estimated[BUDGET]
    sides = {name: side(estimated[name], true) for name, true in truths.items()}
    return sides | {f"{BUDGET} without ‡": side(unmarked, truths[BUDGET])}


def side(estimate: Estimate | None, true: float) -> tuple[float, float]:
    if estimate is None or estimate.low is None or estimate.high is None:
        return math.nan, math.nan
    return true < estimate.low, true > estimate.high


def heavy_misses(share: float, num_prompts: int, samples: int, seed: Sequence[int]) -> Sides:
    """The effective share of whole responses, and at the length budget where that lies within them: d is normal, so
    that the share at a length is exp(-Var(S)).
    """
    random = np.random.default_rng(seed)
    num_sequences, variance = num_prompts * samples, -math.log(share) / HEAVY_LENGTH
    prompts = np.arange(num_sequences) // samples
    sequences = Sequences.of_lengths(np.full(num_sequences, HEAVY_LENGTH), prompts)
    log_mu = np.full(sequences.num_tokens, -5.0)
    pair = TokenPair(sequences, log_mu + random.normal(-variance / 2, math.sqrt(variance), log_mu.size), log_mu)
    law = length_law(pair)
    at_budget = math.nan if law.budget_tokens is None else math.exp(-variance * int(law.budget_tokens.value))
    return {
        "ess_seq": side(pair_metrics(pair, names=["ess_seq"])[0]["ess_seq"], share),
        "ess_at_budget": side(law.ess_at_budget, at_budget),
    }


def truth(design: Design, number: int) -> dict[str, float]:
    one_a_prompt = replace(design, samples=1)
    batches = [
        estimates(draw(one_a_prompt, TRUTH_SEQUENCES // TRUTH_BATCHES, np.random.default_rng([number, batch])))
        for batch in range(TRUTH_BATCHES)
    ]
    values: dict[str, list[float]] = {name: [] for name in batches[0]}
    for batch in batches:
        for name, estimate in batch.items():
            assert estimate is not None, name
            values[name].append(estimate.value)
    return {name: float(np.mean(drawn)) for name, drawn in values.items()}


def show(title: str, columns: dict[str, list[Sides]]) -> None:
    """One line an estimate: of each column the percentage that holds the truth, and where the others have it."""
    print(f"{title:<32}" + "".join(f"{name:>10} (below, above)      " for name in columns), flush=True)
    for estimate in next(iter(columns.values()))[0]:
        cells = ""
        for samples in columns.values():
            of_samples = np.array([sample[estimate] for sample in samples])
            none = 100 * np.isnan(of_samples[:, 0]).mean()
            below, above = 100 * np.nanmean(of_samples, axis=0) if none < 100 else (math.nan, math.nan)
            note = f"none: {none:.1f} %" if none else ""
            cells += f"{100 - below - above:>10.1f} ({below:>4.1f}, {above:>4.1f}) {note:<14}"
        print(f"  {estimate:<30}{cells}", flush=True)


def of_tokens(pool: Pool, repeats: int, designs: Sequence[int], sizes: Sequence[int]) -> None:
    for number in designs:
        truths = truth(DESIGNS[number], number)
        columns = {}
        for n in sizes:
            tasks = [(DESIGNS[number], n, truths, (99, number, n, repeat)) for repeat in range(repeats)]
            columns[f"{n} seq."] = pool.starmap(misses, tasks, chunksize=16)
        show(DESIGNS[number].name, columns)


def of_few_prompts(pool: Pool, repeats: int) -> None:
    truths = truth(UNLIKE_PROMPTS, len(DESIGNS))
    columns = {}
    for prompts, samples in SHAPES:
        design = replace(UNLIKE_PROMPTS, samples=samples)
        tasks = [(design, prompts * samples, truths, (98, prompts, samples, repeat)) for repeat in range(repeats)]
        columns[f"{prompts} x {samples}"] = pool.starmap(misses, tasks, chunksize=16)
    show(UNLIKE_PROMPTS.name, columns)


def of_heavy_weights(pool: Pool, repeats: int) -> None:
    for share in TRUE_SHARES:
        columns = {}
        for prompts, samples in HEAVY_SHAPES:
            tasks = [(share, prompts, samples, (97, prompts, samples, repeat)) for repeat in range(repeats)]
            columns[f"{prompts} x {samples}"] = pool.starmap(heavy_misses, tasks, chunksize=16)
        show(f"true effective share {share:g}", columns)


def tail_misses(design: TailDesign, num_prompts: int, samples: int, true: float, seed: Sequence[int]) -> Vector:
    """Of k3: whether its interval holds the truth, whether its tail is marked as open, and both bounds."""
    pair = draw_tail(design, num_prompts, samples, np.random.default_rng(seed))
    estimate = pair_metrics(pair, names=["kl_k3"])[0]["kl_k3"]
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.tail_bound is not None
    return np.array([estimate.low <= true <= estimate.high, estimate.tail_is_open, true <= estimate.tail_bound])


def of_tails(pool: Pool, repeats: int) -> None:
    print("k3: interval holds the truth / tail is open / a miss is marked / truth is below the tail bound, in percent")
    for design in TAIL_DESIGNS:
        true = expectation(design, lambda d: np.expm1(d) - d, CLIP)
        cells = []
        for prompts, samples in TAIL_SHAPES:
            tasks = [(design, prompts, samples, true, (96, prompts, repeat)) for repeat in range(repeats)]
            holds, is_open, below = np.array(pool.starmap(tail_misses, tasks, chunksize=16)).T.astype(bool)
            marked = f"{100 * is_open[~holds].mean():.0f}" if (~holds).any() else "no miss"
            shares = f"{100 * holds.mean():.1f} / {100 * is_open.mean():.0f} / {marked} / {100 * below.mean():.1f}"
            cells.append(f"{prompts} x {samples}: {shares}")
        print(f"  {design.name:<42} " + "    ".join(cells), flush=True)


PARTS = ("tokens", "few-prompts", "heavy-weights", "tails")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--designs", type=int, nargs="+", default=list(range(len(DESIGNS))))
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    parts = options.parts or PARTS
    with multiprocessing.Pool(options.processes) as pool:
        if "tokens" in parts:
            of_tokens(pool, options.repeats, options.designs, options.sequences)
        if "few-prompts" in parts:
            of_few_prompts(pool, options.repeats)
        if "heavy-weights" in parts:
            of_heavy_weights(pool, options.repeats)
        if "tails" in parts:
            of_tails(pool, options.repeats)


if __name__ == "__main__":
    main()
