"""Injects every fault that can be made into real runs and scores the verdicts.

    python -m benchmarks.fault_lab [--models llama demo FOLDER] [--where clean log training engine] [--scratch FOLDER]
                                  [--only WORD ...] [--seconds N]

FOLDER is that of a real checkpoint. Clean runs are recorded once by the product's own pipeline, engine faults by the
same with the fault. Training faults are scored again on the recorded responses; faults of the log are edits of recorded
legs. All runs are kept in the scratch folder, where a second call only judges them again. `--seconds` leaves out faults
that are not begun by then.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.fault_lab.bench import Bench
from benchmarks.fault_lab.engine_faults import engine_faults
from benchmarks.fault_lab.log_faults import log_faults
from benchmarks.fault_lab.models import CHATS, FAULTLESS_ENGINE, MODELS, PROMPTS, checkpoint
from benchmarks.fault_lab.publish import publish
from benchmarks.fault_lab.recording import CLEAN_DTYPES, record
from benchmarks.fault_lab.scoring import CleanOutcome, Outcome, clean_outcomes, outcome
from benchmarks.fault_lab.training_faults import training_faults

PLACES = ("clean", "log", "training", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help=f"{', '.join(MODELS)}, or folders")
    parser.add_argument("--where", nargs="*", choices=PLACES, default=PLACES)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fault-lab")
    parser.add_argument(
        "--publish", type=Path, help="folder for fault-lab.md and fault-lab.json, in which other rows stay"
    )
    parser.add_argument("--only", nargs="*", default=[""], help="faults with one of these words in name or strength")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after as many seconds")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    outcomes: list[Outcome] = []
    clean: list[CleanOutcome] = []
    for model in arguments.models:
        bench = prepared(model, arguments.scratch, arguments.num_prompts, arguments.num_tokens)
        if "clean" in arguments.where:
            clean += judge_clean(bench)
        outcomes += judge_faults(bench, arguments.where, arguments.only, until)
    if arguments.publish:
        publish(outcomes, clean, arguments.publish)


def judge_clean(bench: Bench) -> Iterator[CleanOutcome]:
    for variant, run in bench.clean_variants():
        for judged in clean_outcomes(bench.model, variant, run):
            print(
                f"{judged.model:15} clean, {variant}, {judged.pair}: {judged.in_run.code}, alone {judged.alone.code}",
                flush=True,
            )
            yield judged


def judge_faults(bench: Bench, places: Sequence[str], words: Sequence[str], until: float) -> Iterator[Outcome]:
    for injection in (*log_faults(), *training_faults(bench), *engine_faults(bench)):
        if not any(word in f"{injection.fault}, {injection.strength}" for word in words):
            continue
        if injection.where in places and (injection.where != "engine" or bench.model not in FAULTLESS_ENGINE):
            start = time.monotonic()
            if start > until:
                print(f"{bench.model:15} no time left for {injection.fault}, {injection.strength}", flush=True)
                continue
            judged = outcome(bench.model, injection, injection.make(bench))
            print(
                f"{bench.model:15} {'named ' if judged.is_named else 'MISSED'} {injection.fault}, "
                f"{injection.strength}: {judged.full.code} | alone {judged.alone.code} | "
                f"16 bit {judged.sixteen_bit.code} "
                f"({time.monotonic() - start:.0f} s)",
                flush=True,
            )
            yield judged


def prepared(model: str, scratch: Path, num_prompts: int, num_tokens: int) -> Bench:
    """A model with its clean run."""
    folder, name = checkpoint(model, scratch), Path(model).name
    source = PROMPTS.get(name, CHATS)
    clean = record(
        scratch / "clean" / name, folder, source, CLEAN_DTYPES, num_prompts=num_prompts, num_tokens=num_tokens
    )
    return Bench(name, folder, clean, scratch, num_prompts, num_tokens)


if __name__ == "__main__":
    main()
