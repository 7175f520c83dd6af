"""How long a log must be for given weights that are off by little: logs of fewer responses drawn from a long one.

    python -m benchmarks.log_faults.log_length FOLDER [--size 0.001] [--draws 100] [--scratch FOLDER]

FOLDER is that of a checkpoint. vLLM samples 96 responses to 24 shipped prompts, and a training path whose tensors are
each off by `--size` scores them in BF16. Asked is the rule of `explain` for weights that somebody gave: do residuals as
declared point to them, and hardly back. Of the clean log the same is asked.
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.fault_lab import in_training
from benchmarks.fault_lab.models import CHATS, with_weights
from benchmarks.fault_lab.recording import record
from benchmarks.log_faults.bench import Bench, Columns
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.judging import Judge
from mismatch_probe.explain.search import is_drawn_to
from mismatch_probe.stats.rounding import Floor

NUM_PROMPTS, SAMPLES, NUM_TOKENS = 24, 4, 64
NUM_RESPONSES: Final = (6, 9, 13, 18, 27, 40, 60, 96)


@dataclass(frozen=True)
class Scores:
    """Standard errors by which the residuals as declared point to the given weights, and those of these point back."""

    forth: float
    back: float
    is_named: bool


@dataclass(frozen=True)
class Log:
    """Columns of each response: as declared and by the given weights in FP32, rounded, and what a side logged."""

    declared: Columns
    by_other_weights: Columns
    rounded: Columns
    logged: Columns

    def scores(self, rows: np.ndarray) -> Scores:
        """Of the log that has these responses alone."""
        declared, others, rounded, logged = (
            np.concatenate([columns[row] for row in rows]).astype(np.float64)
            for columns in (self.declared, self.by_other_weights, self.rounded, self.logged)
        )
        everywhere = np.ones(len(declared), dtype=np.bool_)
        floor = Floor.measure(rounded - declared, declared, everywhere)
        lengths = [len(self.declared[row]) for row in rows]
        judge = Judge(logged, np.zeros_like(logged), np.repeat(np.arange(len(rows)), lengths), everywhere)
        account, null = judge.account(others, floor), judge.account(declared, floor)
        is_named = judge.standard_scores(account, null) > 0 and is_drawn_to(judge, account, null)
        return Scores(judge.drawn_to(account, null), judge.drawn_to(null, account), is_named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", type=float, default=1e-3)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "log-length")
    arguments = parser.parse_args()
    bench = recorded(arguments.model.resolve(), arguments.scratch)
    other = in_training.other_weights(bench.checkpoint, arguments.scratch / "off", arguments.size)
    open_other = in_training.on(with_weights(other, other, as_bf16))
    faulty, exact = bench.scored(open_other), replace(bench, is_exact=True).scored(open_other)
    logs = (Log(bench.ref, exact, bench.pi, faulty), Log(bench.ref, exact, bench.pi, bench.mu))
    random = np.random.default_rng(0)
    print("| responses | tokens | named | points there | points back | a clean log named |\n|---|---|---|---|---|---|")
    for num_responses in NUM_RESPONSES:
        if num_responses > len(bench.ref):
            break
        num_draws = 1 if num_responses == len(bench.ref) else arguments.draws
        drawn = [random.permutation(len(bench.ref))[:num_responses] for _ in range(num_draws)]
        off, clean = ([log.scores(rows) for rows in drawn] for log in logs)
        num_tokens = np.mean([sum(len(bench.ref[row]) for row in rows) for rows in drawn])
        print(
            f"| {num_responses} | {num_tokens:,.0f} | {sum(scores.is_named for scores in off)} of {num_draws} "
            f"| {np.mean([scores.forth for scores in off]):.1f} | {np.mean([scores.back for scores in off]):.1f} "
            f"| {sum(scores.is_named for scores in clean)} of {num_draws} |",
            flush=True,
        )


def as_bf16(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """A side holds its weights in BF16, and `explain` computes those that it holds."""
    return tensor.bfloat16().float()


def recorded(checkpoint: Path, scratch: Path) -> Bench:
    """The checkpoint's long log, as vLLM sampled it and as the training path scores it."""
    run = record(
        scratch / "clean" / checkpoint.name,
        checkpoint,
        CHATS,
        (Dtype.BF16,),
        num_prompts=NUM_PROMPTS,
        num_tokens=NUM_TOKENS,
        sampling={"samples_per_prompt": SAMPLES},
    )
    return Bench(checkpoint.name, checkpoint, run, scratch, Dtype.BF16)


if __name__ == "__main__":
    main()
