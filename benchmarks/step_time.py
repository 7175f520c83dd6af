"""Seconds of a training step against TRL's GRPOTrainer: same checkpoint, problems, batch, format, and vLLM settings.

    pip install --no-deps trl==1.16.0
    python -m benchmarks.step_time --steps 10 --rounds 3
    python -m benchmarks.step_time --steps 6 --rounds 3 --source sums:terms=24 --prompts 8 --new-tokens 400

Each round runs one process of each, in turn; a run's first two steps warm up and are left out. Both engines run
eagerly, and both processes ask the same of the system's libraries (`mismatch_probe.host`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.trl_trainer import SAMPLES, demo_trainer
from mismatch_probe import host

WARM_UP = 2
DTYPE = "bf16"
PHASES = ("sync", "probe", "sample", "score", "measure", "learn", "guards", "update")
GUARDING = ("probe", "measure", "guards")


def ours(work: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """The metrics of each step of `train`."""
    command = f"""train --model demo --task {work.source} --objective grpo --train-dtype {DTYPE} --infer-dtype {DTYPE}
        --prompts-per-step {work.prompts} --samples-per-prompt {SAMPLES} --max-new-tokens {work.new_tokens}
        --learning-rate 1e-5 --steps {work.steps} --checkpoint-every 1000 --vllm.enforce_eager true
        --out {folder / "run"}"""
    subprocess.run([sys.executable, "-m", "mismatch_probe", *command.split()], check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def theirs(work: argparse.Namespace, folder: Path) -> list[float]:
    """Seconds of each step of GRPOTrainer, in a process of its own."""
    command = f"""--inside-trl {folder} --steps {work.steps} --source {work.source} --prompts {work.prompts}
        --new-tokens {work.new_tokens}"""
    subprocess.run([sys.executable, "-m", "benchmarks.step_time", *command.split()], check=True, capture_output=True)
    stamps: list[float] = json.loads((folder / "stamps.json").read_text())
    return [after - before for before, after in pairwise(stamps)]


def run_trl(work: argparse.Namespace, folder: Path) -> None:
    """GRPOTrainer with colocated vLLM; writes when training began and when each step ended."""
    host.prepare_process()
    from transformers import TrainerCallback

    class Stamps(TrainerCallback):
        def __init__(self) -> None:
            self.stamps: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.stamps.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.stamps.append(time.perf_counter())

    stamps = Stamps()
    trainer = demo_trainer(
        folder,
        steps=work.steps,
        source=work.source,
        prompts=work.prompts,
        new_tokens=work.new_tokens,
        callbacks=[stamps],
    )
    trainer.train()
    (folder / "stamps.json").write_text(json.dumps(stamps.stamps))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", default="sums:terms=3")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--inside-trl", type=Path)
    options = parser.parse_args()
    if options.inside_trl is not None:
        run_trl(options, options.inside_trl)
        return
    if find_spec("trl") is None:
        sys.exit("TRL is not installed; run pip install --no-deps trl==1.16.0")
    ratios, steps = [], []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            measured = ours(options, Path(folder))[WARM_UP:]
            b = statistics.median(theirs(options, Path(folder))[WARM_UP:])
        a = statistics.median(step["time/step_seconds"] for step in measured)
        steps += measured
        ratios.append(a / b)
        print(f"round {number}: train {a:.2f} s a step, GRPOTrainer {b:.2f} s, ratio {a / b:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")
    print_phases(steps)


def print_phases(steps: list[dict[str, float]]) -> None:
    """Where our steps of all rounds went, medians."""
    median_seconds = statistics.median(step["time/step_seconds"] for step in steps)
    seconds = {phase: statistics.median(step[f"time/{phase}_seconds"] for step in steps) for phase in PHASES}
    tokens = statistics.median(step["time/tokens_per_second"] * step["time/step_seconds"] for step in steps)
    print(f"our step: {median_seconds:.3f} s, {tokens:.0f} response tokens")
    for phase, spent in seconds.items():
        print(f"  {phase:8} {spent:.4f} s  {spent / median_seconds:6.1%}")
    guarding = statistics.median(
        sum(step[f"time/{phase}_seconds"] for phase in GUARDING) / step["time/step_seconds"] for step in steps
    )
    print(f"metrics, guards and the probe together: {guarding:.2%} of a step")


if __name__ == "__main__":
    main()
