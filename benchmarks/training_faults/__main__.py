"""Faults injected into real training runs on the shipped checkpoint, and what the default guards say and do.

    python -m benchmarks.training_faults [--what faults clean edge answers cost] [--only WORD ...] [--publish reports]

Every draw of a fault is a run of its own in this process: vLLM and the training path, small steps, those before the
fault copied from a clean twin; its policy is measured at the end beside the twin's. Its onset, its interval of
checkpoints and, where it heals, how long it lasts are drawn at random, the same in every call; `--draws` says how many
runs a fault has. Clean runs have many shapes. Each action of the
guards is proven in a run, and the cost of metrics and guards is read off the clock of a larger one. What came of a run
is kept in the scratch folder, where a second call reads it; `--seconds` ends a call early, and the next one goes on.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.training_faults.answers import PROOFS, proof
from benchmarks.training_faults.clean_runs import SHAPES, clean_outcome
from benchmarks.training_faults.cost import cost
from benchmarks.training_faults.fault import TRAINED, Fault
from benchmarks.training_faults.faults import FAULTS
from benchmarks.training_faults.kept_outcomes import NotRunError
from benchmarks.training_faults.outcomes import fault_outcome
from benchmarks.training_faults.publish import Results, publish
from mismatch_probe.dtypes import Dtype

WHAT = ("faults", "clean", "edge", "answers", "cost")
EDGE_SHAPE = "8 x 4"
OFTEN = 2
"""Clean steps after which the loss scale doubles where it is kept at the edge of overflow."""

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="*", choices=WHAT, default=WHAT)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="faults and shapes with one of these words in their name"
    )
    parser.add_argument("--dtypes", nargs="*", choices=TRAINED, default=TRAINED)
    parser.add_argument("--draws", nargs="*", type=int, default=[0], help="numbers of the draws of each fault")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "training-faults")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after as many seconds")
    parser.add_argument("--publish", type=Path, help="folder for training-guards.md and training-guards.json")
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch
    results, dtypes, words = Results(), arguments.dtypes, arguments.only
    until = time.monotonic() + arguments.seconds
    results_of = partial(_results_of, results, until)
    if "faults" in arguments.what:
        faults = [(fault, dtype) for dtype in dtypes for fault in chosen(dtype, words)]
        results.faults = results_of(
            partial(fault_outcome, fault, dtype, fault.drawn(dtype, number), scratch)
            for number in arguments.draws
            for fault, dtype in faults
        )
    if "clean" in arguments.what:
        shapes = [(dtype, shape) for dtype in dtypes for shape in SHAPES if any(word in shape for word in words)]
        results.clean = results_of(partial(clean_outcome, dtype, shape, scratch) for dtype, shape in shapes)
    if "edge" in arguments.what and Dtype.FP16 in dtypes:
        results.at_the_edge = results_of([partial(clean_outcome, Dtype.FP16, EDGE_SHAPE, scratch, OFTEN)])
    if "answers" in arguments.what:
        results.proofs = results_of(partial(proof, make, scratch) for make in PROOFS)
    if "cost" in arguments.what:
        results.costs = results_of(partial(cost, dtype, scratch) for dtype in dtypes)
    if arguments.publish:
        publish(results, arguments.publish, shlex.join(["python", "-m", "benchmarks.training_faults", *sys.argv[1:]]))
    if results.not_run:
        sys.exit(f"time is up; the same call goes on where this one ended: {', '.join(results.not_run)}")


def chosen(dtype: Dtype, words: list[str]) -> list[Fault]:
    return [
        fault
        for fault in FAULTS
        if dtype in fault.dtypes and any(word in f"{fault.name} {fault.strength}" for word in words)
    ]


def _results_of(results: Results, until: float, works: Iterable[Callable[..., Result]]) -> list[Result]:
    """What came of each, printed as it comes; what there was no time for is noted."""
    made = []
    for work in works:
        try:
            result = work(until=until)
        except NotRunError as error:
            results.not_run.append(str(error))
            continue
        print(result, flush=True)
        made.append(result)
    return made


if __name__ == "__main__":
    main()
