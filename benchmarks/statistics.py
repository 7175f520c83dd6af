"""Processor time and peak memory of everything `stats` computes on one pair, at growing numbers of tokens.

    python benchmarks/statistics.py [--tokens 1000000 3000000 10000000]

Each size runs in a process of its own, so that peak memory (its whole resident set, input included) is its own. Times
are the processor's, which other work on the machine does not lengthen; one thread does all the work.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.bins import confidence_bins
from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.estimator import blame
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.stats.worst_responses import error_histograms, probability_scatter, worst_tokens

MEAN_LENGTH = 500

Leg = npt.NDArray[np.float32]

STAGES: dict[str, Callable[[TokenPair], object]] = {
    "metrics": pair_metrics,
    "length": length_law,
    "blame": blame,
    "confidence": confidence_bins,
    "corrections": simulate_corrections,
    "scatter": probability_scatter,
    "histograms": error_histograms,
    "worst": lambda pair: worst_tokens(pair, 20),
}


def synthetic_pair(num_tokens: int) -> TokenPair:
    """Heavy-tailed, clustered deviations with every leg a run records, in float32 as they are on disk."""
    random = np.random.default_rng(0)
    num_sequences = max(num_tokens // MEAN_LENGTH, 2)
    lengths = random.integers(MEAN_LENGTH // 10, 2 * MEAN_LENGTH - MEAN_LENGTH // 10, num_sequences)
    sequences = Sequences.of_lengths(lengths, np.arange(num_sequences) // 2)
    total = sequences.num_tokens
    scale = sequences.spread(0.01 * np.exp(random.normal(0, 0.3, num_sequences))).astype(np.float32)
    log_ref = -0.5 - random.exponential(0.5, total).astype(np.float32)

    def leg() -> Leg:
        noise = random.standard_exponential(total, np.float32) * random.choice(np.array([-1, 1], np.float32), total)
        return np.asarray(log_ref + scale * noise)

    top1 = random.integers(0, 50_000, total, dtype=np.int32)
    return TokenPair(
        sequences,
        log_pi=leg(),
        log_mu=leg(),
        log_ref=log_ref,
        top1_pi=top1,
        top1_mu=np.where(random.random(total) < 0.01, 0, top1).astype(np.int32),
        entropy_pi=random.exponential(0.7, total).astype(np.float32),
        log_mu_prefill=leg(),
        log_ref_rounded_pi=leg(),
        log_ref_rounded_mu=leg(),
    )


def measure(num_tokens: int) -> dict[str, float]:
    pair = synthetic_pair(num_tokens)
    seconds = {}
    for name, stage in STAGES.items():
        start = time.process_time()
        stage(pair)
        seconds[name] = time.process_time() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "num_tokens": pair.sequences.num_tokens,
        **seconds,
        "total": sum(seconds.values()),
        "peak_gib": peak_bytes / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    rows = []
    for num_tokens in arguments.tokens:
        command = [sys.executable, __file__, "--one", str(num_tokens)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print("seconds" + "".join(f"{row['num_tokens'] / 1e6:>12.1f}M" for row in rows))
    for name in (*STAGES, "total"):
        print(f"{name:<12}" + "".join(f"{row[name]:>11.2f}  " for row in rows))
    print(f"{'peak GiB':<12}" + "".join(f"{row['peak_gib']:>11.2f}  " for row in rows))


if __name__ == "__main__":
    main()
