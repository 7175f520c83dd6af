"""What `localize` costs beside scoring the same tokens plainly: `python -m benchmarks.localize_cost OUT.md`.

A plain scoring pass is what `compare` does with recorded responses: the engine replays them, the training path scores
them, the FP32 reference scores them. Each pass is run three times after one to warm up, and the fastest counts.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from mismatch_probe.config.model import EngineSettings, SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import start_engine
from mismatch_probe.engines.vllm.inside import record_activations as record_engine
from mismatch_probe.records.activations import ActivationBatch, ActivationStore, plan_activation_batches
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.inside.recording import BatchPass, score_pass
from mismatch_probe.training_path.inside.recording import record_activations as record_training
from mismatch_probe.training_path.inside.reference_walk import ReferenceWalk
from mismatch_probe.training_path.precision import load_reference_model, load_training_model
from tests.tiny_models import make_checkpoint

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "6.5M parameters, 6 layers of 256": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6},
    "42M parameters, 8 layers of 640": {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 8},
}
HEADS: Final = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
NUM_SEQUENCES, LENGTH, BATCH_TOKENS, LOGIT_ROWS = 16, 256, 2048, 2**26 // 320
SETTINGS: Final = TrainingPathSettings()


def _batches() -> list[ActivationBatch]:
    random = np.random.default_rng(0)
    ids = random.integers(3, 250, (NUM_SEQUENCES, LENGTH)).tolist()
    sequences = [TokenSequence(f"s{number}", row[:32], row[32:]) for number, row in enumerate(ids)]
    return plan_activation_batches(sequences, batch_tokens=BATCH_TOKENS, logit_rows=LOGIT_ROWS)


def _fastest(work: Callable[[Path], Any]) -> float:
    """Seconds of the fastest of three runs, each with a fresh folder, after one that does not count."""
    seconds = []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            work(Path(folder))
            seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def _engine(checkpoint: str, scratch: Path) -> dict[str, float]:
    batches, times = _batches(), {}
    settings = EngineSettings(args={"enforce_eager": True})
    with start_engine(checkpoint, Dtype.BF16, settings, SamplingSettings(), max_model_len=LENGTH + 8) as engine:
        times["plain"] = _fastest(lambda _: [engine.replay(batch.sequences) for batch in batches])
        for name, modules in (("blocks", False), ("modules", True)):

            def record(folder: Path, modules: bool = modules) -> None:
                record_engine(engine, batches, ActivationStore(folder), modules=modules)

            times[name] = _fastest(record)
            (scratch / name).mkdir()
            record(scratch / name)
    return times


def _training(checkpoint: str, scratch: Path) -> dict[str, float]:
    batches, times, folder, cpu = _batches(), {}, Path(checkpoint), torch.device("cpu")
    model, arithmetic = load_training_model(folder, Dtype.BF16, SETTINGS, cpu, trust_remote_code=False)
    reference, reference_arithmetic, _ = load_reference_model(
        folder, Dtype.FP32, SETTINGS, cpu, rounded_to=None, trust_remote_code=False
    )

    def score(model: Any, arithmetic: Any) -> None:
        with arithmetic.active():
            for batch in batches:
                score_pass(BatchPass.run(model, batch))

    times["pi plain"] = _fastest(lambda _: score(model, arithmetic))
    times["reference plain"] = _fastest(lambda _: score(reference, reference_arithmetic))
    for name, modules in (("blocks", False), ("modules", True)):
        store = ActivationStore(scratch / name)

        def record(folder: Path, modules: bool = modules) -> None:
            record_training(model, arithmetic, batches, ActivationStore(folder), modules=modules)

        def walk(_: Path, modules: bool = modules, store: ActivationStore = store) -> None:
            ReferenceWalk(reference, reference_arithmetic, store, modules=modules).run(batches)

        times[f"pi {name}"] = _fastest(record)
        record(store.root)
        times[f"reference {name}"] = _fastest(walk)
        times[f"stored {name}"] = store.num_bytes() / 2**20
    times["peak memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return times


def _measured(name: str, scratch: Path) -> dict[str, float]:
    checkpoint = make_checkpoint(scratch / "checkpoint", "qwen3", **HEADS, **SHAPES[name])
    measured: dict[str, float] = {}
    for side in ("engine", "training"):
        words = [sys.executable, "-m", "benchmarks.localize_cost", side, str(checkpoint), str(scratch)]
        answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        times = json.loads(answer.splitlines()[-1])
        measured |= {f"mu {key}": value for key, value in times.items()} if side == "engine" else times
    return measured


def publish(path: Path) -> None:
    lines = [
        "# What `localize` costs",
        "",
        f"Seconds for {NUM_SEQUENCES} sequences of {LENGTH} tokens, random Qwen3 in BF16 on the CPU, one thread;",
        f"batches of {BATCH_TOKENS} tokens, the fastest of three runs. Made by `python -m benchmarks.localize_cost`.",
    ]
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            measured = _measured(name, Path(scratch))
        lines += ["", f"## {name}", "", "| pass | plain | by block | by module |", "|---|---|---|---|"]
        totals = {"plain": 0.0, "blocks": 0.0, "modules": 0.0}
        for label, key in (("engine", "mu"), ("training path", "pi"), ("FP32 reference", "reference")):
            row = [measured[f"{key} {kind}"] for kind in totals]
            totals = {kind: total + seconds for (kind, total), seconds in zip(totals.items(), row, strict=True)}
            lines.append(f"| {label} | " + " | ".join(f"{seconds:.2f}" for seconds in row) + " |")
        lines.append("| all three | " + " | ".join(f"{seconds:.2f}" for seconds in totals.values()) + " |")
        times = [f"**{seconds / totals['plain']:.2f}**" for seconds in totals.values()]
        lines.append(f"| times a plain scoring pass | {' | '.join(times)} |")
        lines.append(
            f"\nActivations on disk: {measured['stored blocks']:.0f} MiB by block, "
            f"{measured['stored modules']:.0f} MiB by module. "
            f"Peak memory of the process with both torch models: {measured['peak memory']:.0f} MiB."
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "engine":
        print(json.dumps(_engine(sys.argv[2], Path(sys.argv[3]))))
    elif sys.argv[1] == "training":
        print(json.dumps(_training(sys.argv[2], Path(sys.argv[3]))))
    else:
        publish(Path(sys.argv[1]))
