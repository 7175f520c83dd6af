"""Seconds of a training step against TRL's GRPOTrainer: same checkpoint, problems, batch, format, and vLLM settings.

    pip install --no-deps trl==1.16.0
    python -m benchmarks.step_time --steps 8 --rounds 3

Each round runs one process of each, in turn; a run's first two steps warm up and are left out. TRL's in-place weight
sync fails on vLLM's CPU build, so it is given this project's; and its engine runs eagerly, as ours does there.
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

WARM_UP = 2
PROMPTS, SAMPLES, NEW_TOKENS = 32, 8, 64
SOURCE = "sums:terms=3"


def ours(steps: int, dtype: str, folder: Path) -> list[float]:
    """Seconds of each step of `train`."""
    command = f"""train --model demo --task {SOURCE} --objective grpo --train-dtype {dtype} --infer-dtype {dtype}
        --prompts-per-step {PROMPTS} --samples-per-prompt {SAMPLES} --max-new-tokens {NEW_TOKENS} --learning-rate 1e-5
        --steps {steps} --checkpoint-every 1000 --out {folder / "run"}"""
    subprocess.run([sys.executable, "-m", "mismatch_probe", *command.split()], check=True, capture_output=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["time/step_seconds"] for line in lines]


def theirs(steps: int, dtype: str, folder: Path) -> list[float]:
    """Seconds of each step of GRPOTrainer, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--inside-trl", str(folder), "--steps", str(steps)]
    subprocess.run([*command, "--dtype", dtype], check=True, capture_output=True)
    stamps: list[float] = json.loads((folder / "stamps.json").read_text())
    return [after - before for before, after in pairwise(stamps)]


def run_trl(folder: Path, steps: int, dtype: str) -> None:
    """GRPOTrainer with colocated vLLM; writes when training began and when each step ended."""
    from functools import partial

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from mismatch_probe.config.model import PromptSettings
    from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
    from mismatch_probe.engines.vllm.weights import send_weights
    from mismatch_probe.engines.vllm.worker import WORKER_EXTENSION
    from mismatch_probe.tasks import load_prompts, verify

    class Stamps(TrainerCallback):
        def __init__(self) -> None:
            self.stamps: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.stamps.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.stamps.append(time.perf_counter())

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(verify("sums", one, text)) for one, text in zip(answer, texts, strict=True)]

    def sync(generation: Any) -> None:
        send_weights(generation.llm, generation._iter_named_params(), in_process=True)

    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, worker_extension_cls=WORKER_EXTENSION)
    vllm_generation.VLLMGeneration.sync_weights = sync
    problems = load_prompts(PromptSettings(source=SOURCE, num_prompts=256))
    rows = [{"prompt": [{"role": "user", "content": one.text}], "answer": one.answer} for one in problems]
    stamps = Stamps()
    trainer = GRPOTrainer(
        model=str(DEMO_CHECKPOINT),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            vllm_max_model_length=256,
            learning_rate=1e-5,
            max_steps=steps,
            use_vllm=True,
            vllm_mode="colocate",
            bf16=dtype == "bf16",
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[stamps],
    )
    trainer.train()
    (folder / "stamps.json").write_text(json.dumps(stamps.stamps))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bf16", choices=["bf16"])
    parser.add_argument("--inside-trl", type=Path)
    options = parser.parse_args()
    if options.inside_trl is not None:
        run_trl(options.inside_trl, options.steps, options.dtype)
        return
    if find_spec("trl") is None:
        sys.exit("TRL is not installed; run pip install --no-deps trl==1.16.0")
    ratios = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            a, b = (
                statistics.median(run(options.steps, options.dtype, Path(folder))[WARM_UP:]) for run in (ours, theirs)
            )
        ratios.append(a / b)
        print(f"train {a:.2f} s a step, GRPOTrainer {b:.2f} s: ratio {a / b:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
