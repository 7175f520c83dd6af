"""What the best test could see of weights that change within a response without a record: see reports/planted-logs.md.

    python -m benchmarks.planted_logs.oracle SCRATCH --draws 60

Three tests on the logs that `changing_weights` plants at the weak strength. The oracle knows the law of each log: which
responses it was drawn from, what rounding makes at a token of such a log-prob, how large the planted error is, in which
share of the responses and between which places it ends. By Neyman and Pearson no test names more at its rate of false
alarms: the log-likelihood ratio of the whole log, averaged over the boundaries, which nobody knows.

- *paired*: the same responses without the fault stand beside it, as if d of the sound log were known: a bound that no
  reader of a log can reach.
- *own law*: its limit is drawn from sound logs of the same model and size. It knows what a user does not: how the d of
  this model's sound texts is spread, level by level.
- *any law*: the same ratio, its limit the largest of sound logs of every kind of `clean`, as a limit of a tool must be.

Made for `changing_weights(False)`, level 0.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planted_logs.base import Floats, Log, Response, pick, some
from benchmarks.planted_logs.clean import KINDS
from benchmarks.planted_logs.judging import binomial
from benchmarks.planted_logs.logs import LONGEST, Pools, Random, of_prompt, rms
from benchmarks.planted_logs.pools import all_pools

TIMES, SHARE = 4.0, 0.4
"""Of rms d, and of the responses: the weak strength of `changing_weights`."""
EDGES = np.array([0.0, 1e-3, 1e-2, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, np.inf])
"""Of -log p: within two of these the size of d over 1 - p has one law."""
NODES = 41


@dataclass(frozen=True)
class Law:
    """The density of z = d / (1 - p) of sound tokens by -log p: a mixture of normals around its own sample, whose
    convolution with a normal error is another one.
    """

    samples: tuple[Floats, ...]
    """Of each class, quantiles of z."""

    @classmethod
    def of(cls, log: Log) -> "Law":
        mu, z = tokens(log)
        kinds = np.digitize(-mu, EDGES) - 1
        every = [z[kinds == kind] for kind in range(len(EDGES) - 1)]
        whole = np.quantile(z, np.linspace(0.005, 0.995, NODES))
        return cls(
            tuple(np.quantile(own, np.linspace(0.005, 0.995, NODES)) if own.size > 40 else whole for own in every)
        )

    def log_ratio(self, mu: Floats, z: Floats, size: float) -> Floats:
        """log f1(z) - log f0(z) [T]: f1 has a normal error of this size added."""
        ratio = np.zeros(z.size)
        kinds = np.digitize(-mu, EDGES) - 1
        for kind, centres in enumerate(self.samples):
            own = kinds == kind
            if own.any():
                widths = np.maximum(np.gradient(np.sort(centres)), 0.02 * np.std(centres) + 1e-9)
                without = density(z[own], centres, widths)
                ratio[own] = density(z[own], centres, np.hypot(widths, size)) - without
        return ratio


def density(z: Floats, centres: Floats, widths: Floats) -> Floats:
    far = (z[:, None] - centres) / widths
    of_all = np.log(np.maximum(np.exp(-np.square(far) / 2) / widths, 1e-300).mean(1))
    tails = np.log(1e-4 / np.ptp(centres)) - np.log1p(np.square(z / (np.ptp(centres) + 1e-12)))
    return np.asarray(np.logaddexp(of_all, tails))


def tokens(log: Log) -> tuple[Floats, Floats]:
    mu = np.concatenate([response.mu for response in log])
    d = np.concatenate([response.pi - response.mu for response in log])
    return mu, d / np.maximum(1 - np.exp(mu), 1e-6)


def planted(random: Random, pools: Pools) -> tuple[str, Log, Log, float]:
    """As `changing_weights(False)` at level 0 draws it: the pool's name, the sound log, the log with the fault, and the
    size of its error.
    """
    count = int(random.integers(24, 60))
    family = ("demo", "smollm2")[pick(random, range(2))]
    log = some(random, [response for response in pools[family] if len(response.ids) > 30], count)
    size, seed, made = TIMES * rms(log), int(random.integers(2**31)), []
    for response in log:
        length = len(response.ids)
        if random.random() > SHARE:
            made.append(response)
            continue
        at = int(random.integers(length // 5 + 1, 4 * length // 5))
        error = size * of_prompt(seed, response).standard_normal(LONGEST)[:length] * (1 - np.exp(response.mu))
        mu = np.minimum(np.where(np.arange(length) < at, response.mu + error, response.mu), -1e-7)
        made.append(Response(response.prompt, response.ids, mu, response.pi))
    return family, log, made, size


def ratio_of(log: Log, law: Law, size: float) -> float:
    """The log-likelihood ratio of the log: a response changes with probability SHARE, at any place of its middle."""
    total = 0.0
    for response in log:
        length = len(response.ids)
        mu, z = tokens([response])
        sums = np.concatenate([[0.0], np.cumsum(law.log_ratio(mu, z, size))])
        inside = sums[length // 5 + 1 : max(4 * length // 5, length // 5 + 2)]
        mixed = np.logaddexp.reduce(inside) - np.log(inside.size)
        total += float(np.logaddexp(np.log(1 - SHARE), np.log(SHARE) + mixed))
    return total


def finite(log: Log) -> Log:
    """What of a log both sides have."""
    made = []
    for response in log:
        both = np.isfinite(response.mu) & np.isfinite(response.pi)
        if both.sum() > 30:
            ids = np.asarray(response.ids)[both].tolist()
            made.append(Response(response.prompt, ids, np.minimum(response.mu[both], 0), response.pi[both]))
    return made


def sound_ratios(pools: Pools, laws: dict[str, Law], draws: int) -> dict[str, list[float]]:
    """Of each kind of sound log: its ratios by the law that is the kinder one, error sizes as in a fault of its own."""
    found: dict[str, list[float]] = {}
    for number in range(draws):
        for kind, (draw, _) in KINDS.items():
            if kind in ("experts", "conversations", "greedy"):
                continue
            log = finite(draw(np.random.default_rng([number, *kind.encode()]), pools))[:60]
            if len(log) >= 6:
                size = TIMES * rms(log)
                found.setdefault(kind, []).append(min(ratio_of(log, law, size) for law in laws.values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--smollm2", type=Path, default=Path("build/real/smollm2"))
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--sound", type=int, default=9)
    parser.add_argument("--seed", type=int, default=22)
    flags = parser.parse_args()
    pools = all_pools(flags.scratch, flags.smollm2)
    name = "weights that change, not recorded"
    laws = {family: Law.of(pools[family]) for family in ("demo", "smollm2")}
    cases = [
        planted(np.random.default_rng([flags.seed, draw, 0, *name.encode()]), pools) for draw in range(flags.draws)
    ]
    with_fault = np.array([ratio_of(made, laws[family], size) for family, _, made, size in cases])
    without = np.array([ratio_of(log, laws[family], size) for family, log, _, size in cases])
    same_kind: dict[str, list[float]] = {family: [] for family in laws}
    for number in range(400):
        family, log, _, size = planted(np.random.default_rng([flags.seed + 1, number]), pools)
        same_kind[family].append(ratio_of(log, laws[family], size))
    limits = {family: float(np.quantile(values, 1 - 1 / 126)) for family, values in same_kind.items()}
    every = sound_ratios(pools, laws, flags.sound)
    any_limit = max(max(values) for values in every.values())
    families = [family for family, *_ in cases]
    own_limit = np.array([limits[family] for family in families])
    report: dict[str, object] = {"limits of own laws": limits, "limit of any sound log": any_limit}
    report["largest by kind"] = {kind: round(max(values), 1) for kind, values in every.items()}
    tests: dict[str, Callable[[], np.ndarray]] = {
        "paired": lambda: with_fault > without,
        "own law": lambda: with_fault > own_limit,
        "any law": lambda: with_fault > any_limit,
    }
    for test, judge in tests.items():
        named = judge()
        low, high = binomial(int(named.sum()), len(named))
        by_family = {
            f: f"{sum(n for n, g in zip(named, families, strict=True) if g == f)} of {families.count(f)}" for f in laws
        }
        report[test] = f"{int(named.sum())} of {len(named)} [{low:.0%}, {high:.0%}]; {by_family}"
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
