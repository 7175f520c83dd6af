"""In how many draws dropout is named by tokens that occur again after the same context, and in how many it could be.

    python -m benchmarks.log_faults.dropout_draws FOLDER --scratch SCRATCH --prompts 12 --samples 2 --tokens 24

The log is that of `python -m benchmarks.log_faults --models FOLDER` with the same sizes and scratch folder. Each draw
scores it once more with dropout, and asks what `explain` asks where no hypothesis explains a side. The oracle knows how
far dropout scatters each of the repeated tokens: by Neyman and Pearson no test of them sees more draws while it accuses
one in a thousand sides that differ from themselves by `ROUNDING_FLOORS` units of rounding, or by one.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.fault_lab import in_training
from benchmarks.log_faults.__main__ import prepared
from benchmarks.log_faults.bench import Bench, Columns, logged
from benchmarks.log_faults.designs import design_of
from benchmarks.planted_logs.judging import binomial
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.judging import Account, Judge, LoggedTokens
from mismatch_probe.explain.sentences import ROUNDING_FLOORS, WRONG_AT_MOST, RepeatSpread, repeats
from mismatch_probe.stats.rounding import Floor
from mismatch_probe.stats.sequences import Floats


def spread_of(bench: Bench, columns: Columns, declared: Account) -> RepeatSpread:
    tokens = LoggedTokens.of(logged(bench.sequences, bench.mu, columns))
    column = np.concatenate(columns).astype(np.float64)
    judge = Judge(column, np.zeros_like(column), tokens.rows, np.ones(column.size, dtype=np.bool_))
    return repeats(tokens, judge, declared)


def pairs_of(bench: Bench) -> list[tuple[int, int]]:
    """The two flat places of each token that occurs twice after the same context."""
    first: dict[tuple[int, ...], int] = {}
    pairs, start = [], 0
    for sequence in bench.sequences:
        for place in range(len(sequence.token_ids)):
            context = (*sequence.prompt_token_ids, -1, *sequence.token_ids[: place + 1])
            if context in first:
                pairs.append((first[context], start + place))
            first.setdefault(context, start + place)
        start += len(sequence.token_ids)
    return pairs


def power_of_oracle(distances: Floats, rounding: float, generator: np.random.Generator) -> float:
    """The share of draws that the likelihood ratio of normal errors names; distances: differences of pairs over the
    root of two, in units of rounding [draws, pairs].
    """
    scatter = np.square(distances).mean(0)
    weights = 1 / rounding**2 - 1 / (rounding**2 + scatter)
    by_chance = np.square(generator.normal(size=(200_000, scatter.size)) * rounding) @ weights
    noisy = distances + rounding * generator.normal(size=distances.shape)
    return float((np.square(noisy) @ weights > np.quantile(by_chance, 1 - WRONG_AT_MOST)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.01, 0.1])
    for name in ("prompts", "samples", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    flags = parser.parse_args()
    size = {name: getattr(flags, name) for name in ("prompts", "samples", "tokens")}
    bench = prepared(flags.model, replace(design_of(flags.model), **size), Dtype.BF16, flags.scratch)
    exact, rounded = (np.concatenate(columns).astype(np.float64) for columns in (bench.ref, bench.pi))
    unit = Floor.measure(rounded - exact, exact, np.ones(exact.size, dtype=np.bool_)).at(exact)
    pairs = np.array(pairs_of(bench))
    generator = np.random.default_rng(0)
    for share in flags.shares:
        spreads, distances = [], []
        for draw in range(flags.draws):
            torch.manual_seed(draw)
            columns = bench.scored(in_training.with_dropout(bench.checkpoint, share))
            spreads.append(spread_of(bench, columns, Account(exact, unit)))
            units = np.concatenate(columns) / unit
            distances.append((units[pairs[:, 0]] - units[pairs[:, 1]]) / np.sqrt(2))
        num_unlike = sum(each.disagree for each in spreads)
        other_weights = sum(each.agree for each in spreads)
        print(
            f"dropout {share:g}: named in {num_unlike} of {len(spreads)} {binomial(num_unlike, len(spreads))}, "
            f"taken for other weights in {other_weights}; {spreads[0].degrees} degrees of freedom; spread "
            f"{np.round(np.sort([each.spread_floors for each in spreads]), 1).tolist()} floors, of "
            f"{np.median([each.residual_floors for each in spreads]):.3g} from the checkpoint; the oracle names "
            + ", ".join(
                f"{power_of_oracle(np.array(distances), rounding, generator):.0%} at rounding of {rounding:g}"
                for rounding in (ROUNDING_FLOORS, 1.0)
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
