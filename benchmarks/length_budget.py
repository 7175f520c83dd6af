"""The length budget that the first tokens of a run foretell, against the effective sample measured at that length.

    mismatch-probe compare --config benchmarks/length_budget.toml --out RUN
    python -m benchmarks.length_budget RUN [--fit-on 256 512] [--ess 0.95 0.9 0.85 0.8]

The budget T* is fitted on the first tokens of every response, for each share of samples that is to count (ESS). Beside
it: the closed form from the same tokens, and the ESS of exp(S) measured on the whole run at T* and at the closed form,
over the responses that are as long. The run's own T* is fitted on all tokens.
"""

import argparse
from pathlib import Path

import numpy as np

from mismatch_probe.difference.samples import pair_text, read_samples
from mismatch_probe.difference.versus import part_of
from mismatch_probe.notation import ABSENT, write_count, write_estimate, write_number, write_tokens
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.stats.spread import FEWEST_SEQUENCES

HEADS = (
    "fitted on tokens up to",
    "asked ESS",
    "T* fitted",
    "ESS measured there",
    "closed form",
    "ESS measured there",
    "T* of the whole run",
)


def first_tokens(pair: TokenPair, num_tokens: int) -> TokenPair:
    first_part = part_of(pair, position=(0, num_tokens))
    assert first_part is not None, "every response has a first token"
    return first_part


def measured_ess(pair: TokenPair, num_tokens: int) -> Estimate | None:
    """ESS of the whole weights of the first `num_tokens` tokens; None where too few responses are as long."""
    reached = pair.sequences.lengths >= num_tokens
    if num_tokens < 1 or reached.sum() < FEWEST_SEQUENCES:
        return None
    cut = first_tokens(pair, num_tokens)
    part = Estimator(pair.sequences).of_part(reached, np.full(int(reached.sum()), num_tokens))
    return part.effective_share(cut.diff_sums[reached], "sequence")


def rows(pair: TokenPair, fit_on: list[int], shares: list[float]) -> list[list[str]]:
    first_part = []
    for num_tokens in fit_on:
        start = first_tokens(pair, num_tokens)
        for share in shares:
            law, law_of_all = length_law(start, ess=share), length_law(pair, ess=share)
            at_fitted, at_closed = (
                None if budget is None else measured_ess(pair, round(budget.value))
                for budget in (law.budget_tokens, law.budget_closed_form)
            )
            first_part.append(
                [
                    write_count(num_tokens),
                    f"{share:g}",
                    str(write_tokens(law.budget_tokens)),
                    str(write_estimate(at_fitted)),
                    ABSENT if law.budget_closed_form is None else write_number(law.budget_closed_form.value),
                    str(write_estimate(at_closed)),
                    str(write_tokens(law_of_all.budget_tokens)),
                ]
            )
    return first_part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--fit-on", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--ess", type=float, nargs="+", default=[0.95, 0.9, 0.85, 0.8])
    options = parser.parse_args()
    run = RunDirectory(options.run)
    for name, sample in read_samples(run, run.read_manifest()).items():
        pair = sample.data.pair
        assert pair is not None, f"{pair_text(name)} has no usable response"
        lengths = pair.sequences.lengths
        print(f"\n{pair_text(name)}: {lengths.size} responses, {np.median(lengths):.0f} tokens at the median, ", end="")
        print(f"{lengths.max()} at most\n")
        for row in (list(HEADS), ["---"] * len(HEADS), *rows(pair, options.fit_on, options.ess)):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
