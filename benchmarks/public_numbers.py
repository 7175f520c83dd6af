"""Laws that others measured on other models, looked for in runs of one's own: the tables of reports/public-numbers.md.

    mismatch-probe compare --config benchmarks/public_numbers.toml --model CHECKPOINT --out RUN
    python -m benchmarks.public_numbers RUN [RUN ...]

Intervals are of 95 %, by resampling the prompts.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.config.comparison import PairName
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.sequences import Floats, Mask, Repeat, TokenPair, difference, probability

BF16, FP16, FP32 = ((dtype, dtype) for dtype in ("bf16", "fp16", "fp32"))
EDGES: Final = (0.0, 0.01, 0.1, 0.5, 0.9, 1.01)
BAND: Final = np.log([0.9, 1.1])
DRAWS: Final = 4000
ABSENT: Final = "n/a"

Statistic = Callable[..., Floats]
"""Of sums [draws] of each column over the prompts that were drawn."""


@dataclass(frozen=True)
class Law:
    """What the law is of, what it was elsewhere, and what it is in a run, or ABSENT."""

    name: str
    public: str
    find: Callable[["Run"], str]


class Run:
    """The pairs of a run, with the sums of each prompt."""

    def __init__(self, path: Path) -> None:
        run = RunDirectory(path)
        manifest = run.read_manifest()
        reader = RunReader(run, manifest)
        self.name = Path(manifest.settings.model.path).name
        self.data: dict[PairName, PairData] = {name: reader.pair(name) for name in manifest.settings.pairs}
        self.prompts = sorted({name for data in self.data.values() for name in data.cluster_names})

    def pair(self, name: PairName) -> TokenPair | None:
        return self.data[name].pair if name in self.data else None

    def sums(self, name: PairName, values: Floats) -> Floats:
        """Values [T] of a pair's tokens, summed by prompt [G]."""
        data = self.data[name]
        assert data.pair is not None
        prompts = np.searchsorted(self.prompts, data.cluster_names)
        sums = np.bincount(prompts, data.pair.sequences.sum_by_sequence(values), minlength=len(self.prompts))
        return sums.astype(np.float64)


def estimate(columns: list[Floats], statistic: Statistic) -> str:
    """The statistic of the columns' [G] sums, with its interval over prompts drawn anew."""
    table = np.stack(columns, axis=1)
    drawn = np.random.default_rng(0).multinomial(len(table), np.full(len(table), 1 / len(table)), size=DRAWS)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(*table.sum(axis=0)))
        low, high = np.nanquantile(statistic(*(drawn @ table).T), [0.025, 0.975])
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def error_ratio(side: str) -> Callable[[Run], str]:
    """RMS error of BF16 over that of FP16, each against FP32 on its own responses."""

    def find(run: Run) -> str:
        columns = []
        for name in (BF16, FP16):
            pair = run.pair(name)
            if pair is None or pair.log_ref is None:
                return ABSENT
            leg = pair.log_pi if side == "pi" else pair.log_mu
            errors = difference(leg, pair.log_ref)
            columns += [run.sums(name, errors**2), run.sums(name, np.ones_like(errors))]
        return estimate(columns, lambda a, num_a, b, num_b: np.sqrt((a / num_a) / (b / num_b)))

    return find


def of_errors(name: PairName, statistic: Statistic) -> Callable[[Run], str]:
    """Of the sums of e_pi^2, e_mu^2, e_pi e_mu and d^2."""

    def find(run: Run) -> str:
        pair = run.pair(name)
        if pair is None or pair.log_ref is None:
            return ABSENT
        pi, mu = difference(pair.log_pi, pair.log_ref), difference(pair.log_mu, pair.log_ref)
        return estimate([run.sums(name, column) for column in (pi**2, mu**2, pi * mu, pair.diff**2)], statistic)

    return find


def k3_over_half_square(name: PairName) -> Callable[[Run], str]:
    def find(run: Run) -> str:
        pair = run.pair(name)
        if pair is None:
            return ABSENT
        return estimate([run.sums(name, k3(pair.diff)), run.sums(name, pair.diff**2 / 2)], lambda a, b: a / b)

    return find


def k3(diff: Floats) -> Floats:
    """r - 1 - log r with r = pi/mu [T]."""
    return np.asarray(np.expm1(diff) - diff)


def mean_by_probability(low: float, high: float) -> Callable[[Run], str]:
    """Mean abs(d) of BF16's tokens whose probability under the reference is in [low, high)."""

    def find(run: Run) -> str:
        return estimate(list(_of_bin(run, low, high)[:2]), lambda a, num: a / num)

    return find


def unsure_over_sure(*, by_doubt: bool) -> Callable[[Run], str]:
    """The first bin over the last one; `by_doubt` each in units of its mean 1 - p."""

    def find(run: Run) -> str:
        chosen = [column for edges in (EDGES[:2], EDGES[-2:]) for column in _of_bin(run, *edges)]
        columns = [chosen[number] for number in ((0, 2, 3, 5) if by_doubt else (0, 1, 3, 4))]
        return estimate(columns, lambda a, below_a, b, below_b: (a / below_a) / (b / below_b))

    return find


def _of_bin(run: Run, low: float, high: float) -> tuple[Floats, Floats, Floats]:
    """Sums of abs(d), of tokens and of 1 - p over BF16's tokens of a probability in [low, high)."""
    pair = run.pair(BF16)
    assert pair is not None
    assert pair.log_ref is not None
    likely = probability(pair.log_ref)
    chosen: Mask = (likely >= low) & (likely < high)
    deviation, count, doubt = (
        run.sums(BF16, item * chosen) for item in (pair.abs_diff, np.ones_like(likely), 1 - likely)
    )
    return deviation, count, doubt


def prefill_against_decode(statistic: str) -> Callable[[Run], str]:
    """mu's decode against its own prefill in BF16: mean abs(d), k3, or that k3 over the pair's."""

    def find(run: Run) -> str:
        pair = run.pair(BF16)
        if pair is None or pair.log_mu_prefill is None:
            return ABSENT
        own = difference(pair.log_mu_prefill, pair.log_mu)
        tops = {"abs": np.abs(own), "k3": k3(own), "share": k3(own)}
        below = k3(pair.diff) if statistic == "share" else np.ones_like(own)
        return estimate([run.sums(BF16, tops[statistic]), run.sums(BF16, below)], lambda a, b: a / b)

    return find


def outside_band(name: PairName, repeat: str) -> Callable[[Run], str]:
    """The share of tokens whose ratio of two passes of one side is outside BAND, of how many tokens."""

    def find(run: Run) -> str:
        pair = run.pair(name)
        if pair is None or repeat not in pair.repeats:
            return ABSENT
        again: Repeat = pair.repeats[repeat]
        outside = (again.diff < BAND[0]) | (again.diff > BAND[1])
        return f"{outside.mean():.2%} of {outside.size:,} ({(again.diff != 0).mean():.0%} differ)"

    return find


def laws() -> Iterator[Law]:
    yield Law("error of BF16 / error of FP16, pi", "7.8 to 8.0", error_ratio("pi"))
    yield Law("error of BF16 / error of FP16, mu", "7.8 to 8.0", error_ratio("mu"))
    for name, public in ((BF16, "0.98 to 1.0"), (FP16, "")):
        gap = of_errors(name, lambda pi, mu, _, gap: np.sqrt(gap / (pi + mu)))
        yield Law(f"rms gap / sqrt(a^2 + b^2), {name[0].upper()}", public, gap)
        both = of_errors(name, lambda pi, mu, both, _: both / np.sqrt(pi * mu))
        yield Law(f"correlation of both sides' errors, {name[0].upper()}", "0.02 to 0.04" if public else "", both)
        half = k3_over_half_square(name)
        yield Law(f"k3 / (rms^2 / 2), {name[0].upper()}", "0.99 to 1.01" if public else "", half)
    publics = ("0.110 to 0.124", "0.097 to 0.108", "0.069 to 0.078", "0.028 to 0.031", "0.0008 to 0.0010")
    for (low, high), public in zip(pairwise(EDGES), publics, strict=True):
        between = f"below {high}" if low == 0 else f"above {low}" if high > 1 else f"{low} to {high}"
        yield Law(f"mean abs(d) of BF16 where p is {between}", public, mean_by_probability(low, high))
    yield Law("mean abs(d) where p < 0.01 / where p > 0.9", "120 to 130", unsure_over_sure(by_doubt=False))
    yield Law("the same, each over its mean 1 - p", "", unsure_over_sure(by_doubt=True))
    yield Law(
        "engine's prefill against its decode, BF16: mean abs(d)", "0.0009 to 0.0019", prefill_against_decode("abs")
    )
    yield Law("the same: k3", "5.2e-5 to 1.1e-4", prefill_against_decode("k3"))
    yield Law("the same: k3 / k3 of the pair", "0.05 to 0.14", prefill_against_decode("share"))
    for name, public in ((BF16, "6 to 60 %"), (FP16, "0 to 22 %"), (FP32, "0 %")):
        label = f"outside [0.9, 1.1], {name[0].upper()}"
        yield Law(f"{label}: training path alone against a batch", public, outside_band(name, "pi_other_batch"))
    for name in (BF16, FP16, FP32):
        label = f"outside [0.9, 1.1], {name[0].upper()}"
        yield Law(f"{label}: the same pass again", "0 %", outside_band(name, "pi_again"))
        yield Law(f"{label}: other attention", "", outside_band(name, "pi_other_attention"))
        yield Law(f"{label}: engine's prefill alone against a batch", "", outside_band(name, "mu_other_batch"))
        yield Law(f"{label}: engine's decode alone against a batch", "", outside_band(name, "mu_decoded_alone"))


def sizes(runs: list[Run]) -> Mapping[str, str]:
    return {
        run.name: ", ".join(
            f"{name[0].upper()} {data.pair.sequences.num_tokens:,} tokens of {data.pair.sequences.num_sequences}"
            for name, data in run.data.items()
            if data.pair is not None
        )
        for run in runs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    runs = [Run(path) for path in parser.parse_args().runs]
    for name, size in sizes(runs).items():
        print(f"{name}: {size} responses\n")
    heads = ["law", "public", *(run.name for run in runs)]
    for row in (heads, ["---"] * len(heads), *([law.name, law.public, *map(law.find, runs)] for law in laws())):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
