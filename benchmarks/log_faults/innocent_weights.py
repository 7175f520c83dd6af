"""Clean logs with weights given that no side had: how far do residuals point to them by chance, and who is accused.

    python -m benchmarks.log_faults.innocent_weights [--models llama FOLDER] [--draws 40] [--scratch FOLDER]

Each draw changes every tensor by Gaussian noise, smaller and larger than rounding; both sides of a log of the fault
lab are asked whether they had it.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.log_faults.__main__ import prepared
from benchmarks.log_faults.bench import Bench, Columns, logged
from benchmarks.log_faults.designs import DESIGNS, design_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Context
from mismatch_probe.explain.judging import Floats, Judge, LoggedTokens
from mismatch_probe.explain.passes import LoadedWeights, reference_weights
from mismatch_probe.explain.search import LEAST_SCORES, is_drawn_to
from mismatch_probe.stats.rounding import Floor

SIZES: Final = (3e-4, 1e-3, 3e-3, 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(DESIGNS), help=f"{', '.join(DESIGNS)}, or folders")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "log-faults")
    arguments = parser.parse_args()
    for model in arguments.models:
        bench = prepared(model, design_of(model), Dtype.BF16, arguments.scratch)
        answers = list(ask(bench, arguments.draws))
        scores = np.array([score for score, _ in answers])
        print(
            f"{bench.model}: {len(answers)} questions, {scores.mean():.2f} standard errors on average, their spread "
            f"{scores.std():.2f}, {scores.max():.2f} at most of {LEAST_SCORES:g}; "
            f"accused {sum(accused for _, accused in answers)}",
            flush=True,
        )


def ask(bench: Bench, num_draws: int) -> Iterator[tuple[float, bool]]:
    """Of every draw and both sides: by how many standard errors it is pointed to, and whether the side is accused."""
    tokens = LoggedTokens.of(logged(bench.sequences, bench.mu, bench.pi))
    exact = np.concatenate(bench.ref).astype(np.float64)
    floor = Floor.measure(np.concatenate(bench.pi) - exact, exact, tokens.sampled)
    judges = [_judge(column, tokens) for column in (bench.mu, bench.pi)]
    with reference_weights(bench.settings(), tokens) as declared:
        for other in _others(declared, tokens, num_draws):
            for judge in judges:
                account, null = judge.account(other, floor), judge.account(exact, floor)
                is_better = judge.standard_scores(account, null) > 0
                yield judge.drawn_to(account, null), is_better and is_drawn_to(judge, account, null)


def _judge(columns: Columns, tokens: LoggedTokens) -> Judge:
    column = np.concatenate(columns).astype(np.float64)
    return Judge(column, np.zeros_like(column), tokens.rows, tokens.sampled)


def _others(declared: LoadedWeights, tokens: LoggedTokens, num_draws: int) -> Iterator[Floats]:
    """What weights around the declared ones predict [T], rounded to BF16 as a checkpoint's are."""
    generator = torch.Generator().manual_seed(0)
    kept = {name: weight.data.clone() for name, weight in declared.model.named_parameters()}
    for number in range(num_draws):
        size = SIZES[number % len(SIZES)]
        for name, weight in declared.model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * kept[name].square().mean().sqrt() * size
            weight.data.copy_((kept[name] + noise).bfloat16())
        drawn = LoadedWeights(declared.model, declared.arithmetic, tokens, declared.batch_tokens)
        yield drawn.columns(Context.as_logged(tokens), None, [Distribution(1.0)])[0]


if __name__ == "__main__":
    main()
