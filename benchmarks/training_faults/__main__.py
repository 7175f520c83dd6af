"""Faults injected into real training runs on the shipped checkpoint, and what the default guards say and do.

    python -m benchmarks.training_faults [--what faults clean answers cost] [--only WORD ...] [--publish reports]

Every fault is a run of its own in this process: vLLM and the training path, a dozen small steps, the fault from a step
on. Clean runs are longer. Each action of the guards is proven in a run, and the cost of metrics and guards is read off
the clock of a larger one. What came of a run is kept in the scratch folder, where a second call reads it.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TypeVar

from benchmarks.training_faults.answers import PROOFS, proof
from benchmarks.training_faults.cost import cost
from benchmarks.training_faults.faults import FAULTS, TRAINED, Fault
from benchmarks.training_faults.outcomes import clean_outcome, fault_outcome
from benchmarks.training_faults.publish import Results, publish
from mismatch_probe.dtypes import Dtype

WHAT = ("faults", "clean", "answers", "cost")
CLEAN_SEEDS = range(1, 6)
OFTEN = 2
"""Clean steps after which the loss scale doubles where it is kept at the edge of overflow."""

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="*", choices=WHAT, default=WHAT)
    parser.add_argument("--only", nargs="*", default=[""], help="faults with one of these words in their name")
    parser.add_argument("--dtypes", nargs="*", choices=TRAINED, default=TRAINED)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "training-faults")
    parser.add_argument("--publish", type=Path, help="folder for training-guards.md and training-guards.json")
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch
    results, dtypes = Results(), arguments.dtypes
    if "cost" in arguments.what:
        results.costs = [told(cost(dtype, scratch)) for dtype in dtypes]
    if "answers" in arguments.what:
        results.proofs = [told(proof(make, scratch)) for make in PROOFS]
    if "faults" in arguments.what:
        found = (fault_outcome(one, dtype, scratch) for dtype in dtypes for one in chosen(dtype, arguments.only))
        results.faults = [told(outcome) for outcome in found]
    if "clean" in arguments.what:
        results.clean = [told(clean_outcome(dtype, seed, scratch)) for dtype in dtypes for seed in CLEAN_SEEDS]
    if "clean" in arguments.what and "fp16" in dtypes:
        results.at_the_edge = [told(clean_outcome(Dtype.FP16, seed, scratch, OFTEN)) for seed in CLEAN_SEEDS]
    if arguments.publish:
        publish(results, arguments.publish, "python -m benchmarks.training_faults --publish reports")


def chosen(dtype: Dtype, words: list[str]) -> list[Fault]:
    return [
        one for one in FAULTS if dtype in one.dtypes and any(word in f"{one.name} {one.strength}" for word in words)
    ]


def told(result: Result) -> Result:
    print(result, flush=True)
    return result


if __name__ == "__main__":
    main()
