"""The length budget against the length at which half of the sample is really left, by simulation.

    python -m benchmarks.budget_truth [--repeats 40] [--prompts 256 1024] [--designs 0 1 2]

d is noise of unit variance times a scale, with E e^d = 1 where tokens are normal, or with mean 0. The truth is where
60,000 responses keep half; normal noise is integrated, other noise simulated. Printed: how many samples mark the budget
as known from above alone (‡), how many of the others' intervals hold the truth, how many of the marked ones end above
it, and the quantiles of the budget over the truth.
"""

import argparse
import math
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool

import numpy as np

from benchmarks.tails import OUTLIERS, Prompts, Vector
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.sequences import Sequences, TokenPair

ESS = 0.5
RESPONSES, STEP, FARTHEST = 60_000, 8, 20_000


@dataclass(frozen=True)
class BudgetDesign:
    """degrees: of Student's t of the tokens. drift: mean of d over its variance. skew: nats a token of a bias of each
    response, exponential less its mean. length: median of the responses.
    """

    degrees: float = math.inf
    scale: float = 0.03
    drift: float = -0.5
    prompts: Prompts = "alike"
    skew: float = 0.0
    length: int = 200

    @property
    def name(self) -> str:
        tokens = "normal" if math.isinf(self.degrees) else f"t{self.degrees:g}"
        mean = "E e^d = 1" if self.drift else "E d = 0"
        skew = f", bias {self.skew:g}" if self.skew else ""
        return f"{tokens}, scale {self.scale:g}, {mean}, prompts {self.prompts}{skew}, {self.length} tokens"


DESIGNS = (
    BudgetDesign(length=900),
    BudgetDesign(length=200),
    BudgetDesign(prompts="a tenth at 3x", drift=0.0),
    BudgetDesign(prompts="a tenth at 3x", length=400),
    BudgetDesign(prompts="log-normal", length=400),
    BudgetDesign(degrees=5, length=900),
    BudgetDesign(degrees=3, scale=0.01, length=900),
    BudgetDesign(scale=0.02, skew=5e-4, length=900),
    BudgetDesign(scale=0.02, skew=-5e-4, length=900),
    *(
        BudgetDesign(scale=0.01, prompts="3 in 100 at 10x", drift=drift, length=length)
        for drift in (-0.5, 0.0)
        for length in (100, 400, 900)
    ),
)


def _rates(design: BudgetDesign, size: int, random: np.random.Generator) -> Vector:
    if design.prompts == "log-normal":
        return np.asarray(np.exp(random.normal(size=size)))
    if design.prompts == "alike":
        return np.ones(size)
    share, times = OUTLIERS[design.prompts]
    return np.where(random.random(size) < share, times**2, 1.0)


def _noise(design: BudgetDesign, size: int, random: np.random.Generator) -> Vector:
    if math.isinf(design.degrees):
        return random.normal(size=size)
    return np.asarray(random.standard_t(design.degrees, size) / math.sqrt(design.degrees / (design.degrees - 2)))


def draw(design: BudgetDesign, num_prompts: int, random: np.random.Generator) -> TokenPair:
    lengths = np.clip(random.lognormal(math.log(design.length), 0.4, num_prompts), 16, 3 * design.length)
    sequences = Sequences.of_lengths(lengths.astype(np.int64))
    rates = sequences.spread(_rates(design, num_prompts, random))
    diff = design.scale * np.sqrt(rates) * _noise(design, sequences.num_tokens, random)
    diff += design.drift * design.scale**2 * rates
    diff += sequences.spread(design.skew * (random.exponential(size=num_prompts) - 1))
    log_mu = np.full(sequences.num_tokens, -30.0)
    return TokenPair(sequences, log_mu + diff, log_mu)


def truth(design: BudgetDesign) -> float:
    """The length at which half of the sample is left, in steps of 8 tokens."""
    random = np.random.default_rng(99)
    rates, bias = _rates(design, RESPONSES, random), random.exponential(size=RESPONSES) - 1
    sums, before = np.zeros(RESPONSES), (0, 1.0)
    for length in range(STEP, FARTHEST, STEP):
        variance = design.scale**2 * rates
        sums += STEP * (design.drift * variance + design.skew * bias)
        if math.isinf(design.degrees):
            effective_share = _effective_share(sums, length * variance)
        else:
            noise = np.sum([_noise(design, RESPONSES, random) for _ in range(STEP)], axis=0)
            sums += np.sqrt(variance) * noise
            effective_share = _effective_share(sums, 0.0)
        if effective_share < ESS:
            log_before, log_left = math.log(before[1]), math.log(effective_share)
            return before[0] + STEP * (log_before - math.log(ESS)) / (log_before - log_left)
        before = (length, effective_share)
    raise AssertionError("half of the sample is left at any length")


def _effective_share(sums: Vector, variances: Vector | float) -> float:
    """(E e^S)^2 / E e^(2 S) of normal S with these means and variances, each of one response."""
    return float(np.exp(sums + variances / 2).mean() ** 2 / np.exp(2 * sums + 2 * variances).mean())


Outcome = tuple[bool, bool, bool, float]
"""Whether it is marked, whether the interval holds the truth, whether it ends above it; the budget over the truth."""


def outcome(design: BudgetDesign, num_prompts: int, true: float, repeat: int) -> Outcome | None:
    law = length_law(draw(design, num_prompts, np.random.default_rng([29, num_prompts, repeat])), ESS)
    budget = law.budget_tokens
    if budget is None or budget.low is None or budget.high is None:
        return None
    return law.budget_tail_is_open, budget.low <= true <= budget.high, true <= budget.high, budget.value / true


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--designs", type=int, nargs="+", default=list(range(len(DESIGNS))))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    heads = (
        "responses",
        "truth",
        "prompts",
        "none",
        "marked ‡",
        "others hold it",
        "marked end above it",
        "p10, p50, p90",
    )
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    with Pool(options.processes) as pool:
        for design in (DESIGNS[number] for number in options.designs):
            true = truth(design)
            for num_prompts in options.prompts:
                outcomes = pool.map(partial(outcome, design, num_prompts, true), range(options.repeats))
                print(_row(design, true, num_prompts, outcomes), flush=True)


def _row(design: BudgetDesign, true: float, num_prompts: int, outcomes: list[Outcome | None]) -> str:
    measured_outcomes = [each_outcome for each_outcome in outcomes if each_outcome is not None]
    marked, others = (
        [each_outcome for each_outcome in measured_outcomes if each_outcome[0]],
        [each_outcome for each_outcome in measured_outcomes if not each_outcome[0]],
    )
    holds = f"{sum(each_outcome[1] for each_outcome in others)} of {len(others)}"
    above = f"{sum(each_outcome[2] for each_outcome in marked)} of {len(marked)}"
    spread = ", ".join(
        f"{value:.2f}"
        for value in np.quantile([each_outcome[3] for each_outcome in measured_outcomes], (0.1, 0.5, 0.9))
    )
    cells = (
        design.name,
        f"{true:.0f}",
        str(num_prompts),
        str(len(outcomes) - len(measured_outcomes)),
        str(len(marked)),
        holds,
        above,
    )
    return "| " + " | ".join([*cells, spread]) + " |"


if __name__ == "__main__":
    main()
