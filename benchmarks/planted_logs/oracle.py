"""What the best test could see of weights that change within a response without a record: see reports/planted-logs.md.

    python -m benchmarks.planted_logs.oracle SCRATCH --draws 60

The logs are those of `changing_weights(False)` at the weak strength, of the demo checkpoint. The oracle knows their
law: what rounding makes of the logits at a token as sure, how large the planted error is, in which share of the
responses and between which places it ends. By Neyman and Pearson no test names more at its rate of false alarms: it is
the ratio of the likelihoods of the log, averaged over the places, which nobody knows. Its limit is that of sound logs.

Beside it stands our statistic of a change of level, on tokens of unlike sureness, and with the level of tokens as sure
taken off, so that a text that grows sure is no change; and what the package itself names, of SmolLM2's logs too
(`--pool smollm2`), also where the log records the places. Without a run of the pool's name in SCRATCH, transformers
samples it.
"""

import argparse
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planted_logs.base import Floats, Log, Response, pick, some
from benchmarks.planted_logs.judging import binomial
from benchmarks.planted_logs.logs import LONGEST, Random, of_prompt, rms
from benchmarks.planted_logs.pools import DEMO, pool_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.logs.weight_versions import VersionChecks, version_of
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats import curves
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.verdict import departures
from mismatch_probe.verdict.signatures.profile import Disagreement

TIMES, SHARE = 4.0, 0.4
"""Of rms d, and of the responses: the weak strength of `changing_weights`."""
EDGES = np.array([0.0, 1e-3, 1e-2, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, np.inf])
"""Of -log p: within two of these the size of d over 1 - p has one law."""
NODES = 41
SURENESS = np.arange(-4, 0, 0.5)
"""Of log10 (1 - p)."""
FALSE_ALARMS = 1 / 126


@dataclass(frozen=True)
class Law:
    """The density of z = d / (1 - p) of sound tokens by -log p: a mixture of normals around quantiles of the sample."""

    samples: tuple[Floats, ...]

    @classmethod
    def of(cls, log: Log) -> "Law":
        mu, z = tokens(log)
        kinds = np.digitize(-mu, EDGES) - 1
        nodes = np.linspace(0.005, 0.995, NODES)
        overall = np.quantile(z, nodes)
        every = [z[kinds == kind] for kind in range(len(EDGES) - 1)]
        return cls(tuple(np.quantile(own, nodes) if own.size > 40 else overall for own in every))

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


def planted(random: Random, pool: Log) -> tuple[Log, Log, float]:
    """As `changing_weights(False)` draws it: the sound log, the log with the fault, the size of its error."""
    count = int(random.integers(24, 60))
    pick(random, range(2))
    log = some(random, [response for response in pool if len(response.ids) > 30], count)
    size, seed, made = TIMES * rms(log), int(random.integers(2**31)), []
    for response in log:
        length = len(response.ids)
        if random.random() > SHARE:
            made.append(response)
            continue
        at = int(random.integers(length // 5 + 1, 4 * length // 5))
        error = size * of_prompt(seed, response).standard_normal(LONGEST)[:length] * (1 - np.exp(response.mu))
        mu = np.minimum(np.where(np.arange(length) < at, response.mu + error, response.mu), -1e-7)
        made.append(replace(response, mu=mu).with_extra(weight_versions=(("7", at), ("8", length))))
    return log, made, size


def with_versions(random: Random, log: Log) -> Log:
    """An update so small that rounding is all there is, in each response, recorded."""
    made = []
    for response in log:
        length = len(response.ids)
        at = int(random.integers(length // 5 + 1, 4 * length // 5))
        made.append(response.with_extra(weight_versions=(("7", at), ("8", length))))
    return made


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


def with_tails(random: Random, log: Log) -> Log:
    """One token in a hundred is off, as where routers flip."""
    made = []
    for response in log:
        hit = random.random(len(response.ids)) < 0.01
        error = 0.3 * random.standard_t(2, len(hit)) * (1 - np.exp(response.mu))
        made.append(replace(response, pi=np.minimum(response.pi + hit * error, -1e-7)))
    return made


def with_growth(log: Log) -> Log:
    """Rounding that grows along the response."""
    made = []
    for response in log:
        middle = (response.mu + response.pi) / 2
        grown = (response.mu - middle) * (1 + 1.5 * response.places / response.places[-1])
        made.append(Response(response.prompt, response.ids, np.minimum(middle + grown, -1e-7), response.pi))
    return made


def sizes_of(response: Response) -> tuple[Floats, Floats]:
    """Of each token, 1 - p and log (|d| / (1 - p))."""
    unsure = 1 - np.exp(np.maximum(response.mu, response.pi))
    errors = np.abs(response.pi - response.mu) / np.maximum(unsure, 1e-12)
    return unsure, np.log(np.maximum(errors, 1e-300))


def levels_by_sureness(log: Log) -> Floats:
    """The median size of tokens as sure, by class of SURENESS."""
    unsure, sizes = (np.concatenate(parts) for parts in zip(*map(sizes_of, log), strict=True))
    kinds = np.digitize(np.log10(np.maximum(unsure, 1e-12)), SURENESS)
    return np.array(
        [np.median(sizes[kinds == kind]) if (kinds == kind).any() else 0.0 for kind in range(len(SURENESS) + 1)]
    )


def changes_in(log: Log, least: float, levels: Floats | None) -> tuple[int, int, int]:
    """How many responses rise by our statistic of a change of level, and how many fall, of those that are long enough,
    on tokens that are less sure than 1 - `least`.
    """
    rises = falls = num_long = 0
    for response in log:
        unsure, sizes = sizes_of(response)
        seen = unsure > least
        if seen.sum() < 2 * curves.LEAST_PART:
            continue
        num_long += 1
        own = np.maximum(sizes[seen], np.median(sizes[seen]) - np.log(10))
        if levels is not None:
            own = own - levels[np.digitize(np.log10(unsure[seen]), SURENESS)]
        change = curves.change_of_level(own, [response.places[seen].astype(np.float64)])
        rises += change is not None and change[1] > 0
        falls += change is not None and change[1] < 0
    return rises, falls, num_long


def is_named(log: Log, least: float, levels: Floats | None) -> bool:
    rises, falls, num_long = changes_in(log, least, levels)
    more, fewer = max(rises, falls), min(rises, falls)
    fewest = max(departures.LEAST_RESPONSES, departures.LEAST_SHARE * num_long, departures.ONE_WAY * fewer)
    return more >= fewest


def disagreement_of(log: Log) -> Disagreement:
    """As the package sees a log of both sides in BF16 without a checkpoint."""
    prompts: dict[tuple[int, ...], int] = {}
    numbers = [prompts.setdefault(tuple(response.prompt), len(prompts)) for response in log]
    sequences = Sequences(np.cumsum([0, *(len(response.ids) for response in log)]), np.array(numbers))
    mu, pi = (np.concatenate([getattr(response, side) for response in log]).astype(np.float32) for side in ("mu", "pi"))
    lengths = np.array([len(response.prompt) for response in log])
    pair = TokenPair(sequences, log_pi=pi, log_mu=mu)
    return Disagreement(pair, Dtype.BF16, Dtype.BF16, 1e-6, prompt_lengths=lengths)


def is_named_by_package(log: Log) -> bool:
    """Whether the package names a change of level inside the responses of the log."""
    return departures.level_change_of(disagreement_of(log)) is not None


def is_named_where_recorded(log: Log) -> bool:
    """Whether the package says that the level changes where the log records that the weights do."""
    checks = VersionChecks()
    for response in log:
        length = len(response.ids)
        spans: Any = response.extra.get("weight_versions", (("8", length),))
        checks.add(
            LoggedResponse(
                where="",
                prompt_token_ids=np.array(response.prompt, np.int32),
                token_ids=np.array(response.ids, np.int32),
                sampled=np.ones(length, np.bool_),
                log_mu=response.mu,
                log_pi=response.pi,
                weight_version=version_of(spans),
                weight_spans=spans,
            )
        )
    reading = checks.reading()
    return reading is not None and reading.is_level_changed


def with_coarse_zeros(log: Log) -> Log:
    """A sampler that gives 0 where it is nearly sure."""
    return [replace(response, mu=np.where(response.mu > -0.004, 0.0, response.mu)) for response in log]


def growing_sure(log: Log) -> Log:
    """The less likely half of the tokens stands before the other."""
    made = []
    for response in log:
        by_size = np.argsort(response.mu, kind="stable")
        middle = len(by_size) // 2
        order = np.concatenate([np.sort(by_size[:middle]), np.sort(by_size[middle:])])
        made.append(replace(response, mu=response.mu[order], pi=response.pi[order]))
    return made


def share(named: int, of: int) -> str:
    low, high = binomial(named, of)
    return f"{named} of {of} [{low:.0%}, {high:.0%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--pool", choices=("demo", "smollm2"), default="demo")
    parser.add_argument("--smollm2", type=Path, default=Path("build/real/smollm2"))
    flags = parser.parse_args()
    kept = flags.scratch / f"{flags.pool}.pickle"
    if not kept.exists():
        checkpoint = DEMO if flags.pool == "demo" else flags.smollm2
        kept.write_bytes(pickle.dumps(pool_of(flags.scratch / flags.pool, checkpoint)))
    pool: Log = pickle.loads(kept.read_bytes())
    name = "weights that change, not recorded"
    randoms = [np.random.default_rng([flags.seed, draw, 0, *name.encode()]) for draw in range(flags.draws)]
    cases = [planted(random, pool) for random in randoms]
    sound = {
        "as it is": [log for log, _, _ in cases],
        "heavy tails": [with_tails(random, log) for random, (log, _, _) in zip(randoms, cases, strict=True)],
        "rounding that grows": [with_growth(log) for log, _, _ in cases],
        "zeros of a coarse log-softmax": [with_coarse_zeros(log) for log, _, _ in cases],
        "texts that grow sure": [growing_sure(log) for log, _, _ in cases],
    }
    by_package = sum(is_named_by_package(made) for _, made, _ in cases)
    accused = {kind: sum(map(is_named_by_package, logs)) for kind, logs in sound.items()}
    print(f"the package: named {share(by_package, flags.draws)}; accused {accused}", flush=True)
    recorded = {
        kind: [with_versions(random, log) for random, log in zip(randoms, logs, strict=True)]
        for kind, logs in sound.items()
    }
    by_record = sum(is_named_where_recorded(made) for _, made, _ in cases)
    accused = {kind: sum(map(is_named_where_recorded, logs)) for kind, logs in recorded.items()}
    print(f"where the changes are recorded: named {share(by_record, flags.draws)}; accused {accused}", flush=True)
    levels = levels_by_sureness(pool)
    for least, of_levels in ((0.1, None), (0.01, None), (1e-3, None), (1e-3, levels), (1e-4, levels)):
        named = sum(is_named(made, least, of_levels) for _, made, _ in cases)
        accused = {kind: sum(is_named(log, least, of_levels) for log in logs) for kind, logs in sound.items()}
        how = "as it is" if of_levels is None else "less the level of tokens as sure"
        print(f"1 - p above {least:g}, {how}: named {share(named, flags.draws)}; accused {accused}", flush=True)
    counts = [changes_in(log, 1e-4, levels) for logs in sound.values() for log in logs]
    shares = [max(rises, falls) / max(num_long, 1) for rises, falls, num_long in counts]
    num_changes, num_responses = sum(rises + falls for rises, falls, _ in counts), sum(of for _, _, of in counts)
    print(f"sound responses that change: {num_changes} of {num_responses}, at most {max(shares):.0%} of a log one way")
    law = Law.of(pool)
    with_fault = np.array([ratio_of(made, law, size) for _, made, size in cases])
    others = (planted(np.random.default_rng([flags.seed + 1, number]), pool) for number in range(126))
    limit = float(np.quantile([ratio_of(log, law, size) for log, _, size in others], 1 - FALSE_ALARMS))
    print(f"oracle, limit {limit:.1f}: named {share(int((with_fault > limit).sum()), flags.draws)}")
    print("its ratios, smallest, median, largest:", np.round(np.quantile(with_fault, [0, 0.5, 1]), 1).tolist())


if __name__ == "__main__":
    main()
