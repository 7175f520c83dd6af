"""Directories of training runs as `train` writes them, with the courses of metrics that real runs take."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.config.train import TaskSettings, TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import ModelIdentity
from mismatch_probe.records.training_run import TrainingDirectory, TrainingManifest

LEVELS_K3: dict[Dtype, float] = {Dtype.BF16: 1.2e-5, Dtype.FP16: 2e-7, Dtype.FP32: 1e-12, Dtype.FP64: 1e-16}
TOKENS = 7_500


@dataclass(frozen=True)
class TrainingSample:
    """What a sampled run goes through.

    grows_at: from this step on the mismatch doubles every 4 steps. overflows: steps whose gradients are infinite.
    changes: metrics that replace the sampled ones at a step.
    """

    dtype: Dtype = Dtype.FP16
    steps: int = 60
    steps_asked: int = 60
    outcome: str = "finished"
    seed: int = 0
    grows_at: int | None = None
    overflows: tuple[int, ...] = ()
    changes: dict[int, dict[str, float]] = field(default_factory=dict)
    firings: tuple[dict[str, Any], ...] = ()
    model: str = "demo"
    fingerprint: str = "0" * 16
    problems: str = "1" * 16
    settings: dict[str, Any] = field(default_factory=dict)
    guards: tuple[dict[str, Any], ...] = ()


def firing(step: int, actions: list[str], **changes: Any) -> dict[str, Any]:
    """One line of `events.jsonl`."""
    return {
        "step": step,
        "guard": "mismatch-limit",
        "rule": "limit",
        "metric": "mismatch/kl_k3",
        "value": 0.02,
        "threshold": 0.015,
        "firing": 1,
        "actions": actions,
        "sentence": "mismatch/kl_k3 is 0.02, above its limit of 0.015",
    } | changes


def training_run(path: Path, sample: TrainingSample = TrainingSample()) -> TrainingDirectory:
    """Write the run's files."""
    directory = TrainingDirectory(path)
    directory.path.mkdir(parents=True)
    directory.write_training_manifest(_manifest(sample))
    for step in range(1, sample.steps + 1):
        directory.append_metrics(step, step_metrics(step, sample))
    for event in sample.firings:
        directory.append(directory.events_path, event)
    return directory


def step_metrics(step: int, sample: TrainingSample) -> dict[str, float]:
    """A step's metrics under the names of the trainer's log."""
    random = np.random.default_rng([sample.seed, step, len(sample.dtype) + ord(sample.dtype[0])])

    def noise(spread: float) -> float:
        return float(np.exp(random.normal(0, spread)))

    course = min(1.0, step / 60)
    grown = 2.0 ** ((step - sample.grows_at) / 4) if sample.grows_at is not None and step > sample.grows_at else 1.0
    k3 = LEVELS_K3[sample.dtype] * grown * noise(0.5)
    extreme = min(0.97, 30 * math.sqrt(k3) * noise(0.4) / 2)
    overflow = step in sample.overflows
    length = 29 + random.normal(0, 0.4)
    seconds = {"sync": 0.1, "probe": 0.07, "sample": 3.3, "score": 0.8, "learn": 1.4, "measure": 0.01, "guards": 2e-4}
    seconds = {phase: value * noise(0.1) for phase, value in seconds.items()}
    metrics = {
        "sync/engine_unchanged": 0.0,
        "sync/probe_k3": k3 * noise(0.6),
        "update/policy_shift_k3": 0.0 if step == 1 else 3e-4 * noise(0.6),
        "mismatch/nonfinite_tokens": 0.0,
        "mismatch/kl_k1": k3 * random.normal(0, 2),
        "mismatch/kl_k3": k3,
        "mismatch/abs_logprob_diff": math.sqrt(k3) / 6,
        "mismatch/abs_logprob_diff_max": 40 * math.sqrt(k3) * noise(0.2),
        "mismatch/prob_diff_max": extreme,
        "mismatch/prob_diff_min": -extreme * noise(0.1),
        "mismatch/ess_token": 1 / (1 + 2 * k3),
        "mismatch/ess_seq": 1 / (1 + 60 * k3),
        "mismatch/kl_entropy_ratio": k3 / 0.03,
        "mismatch/temperature_fit": 1 + random.normal(0, math.sqrt(k3)),
        "policy/entropy": 0.032 * 0.5**course * noise(0.05),
        "reward/mean": min(1.0, 0.74 + 0.2 * course + random.normal(0, 0.02)),
        "reward/nonfinite": 0.0,
        "reward/flat_groups_share": 0.2 + 0.4 * course,
        "response/length_mean": length,
        "response/length_max": length + 2,
        "response/truncated_share": 0.0,
        "correction/clipped_share": 0.0,
        "correction/rejected_share": 0.0,
        "correction/ess": 1 / (1 + 60 * k3),
        "optim/loss": random.normal(-5e-3, 1e-3),
        "optim/grad_norm": math.inf if overflow else 0.05 * noise(0.3),
        "optim/clipped_share": 0.0,
        "optim/loss_scale": 2.0 ** (16 - sum(overflow <= step for overflow in sample.overflows))
        if sample.dtype == "fp16"
        else 1,
        "optim/overflow": float(overflow),
        "optim/learning_rate": 1e-4,
        **{f"time/{phase}_seconds": value for phase, value in seconds.items()},
        "time/step_seconds": sum(seconds.values()) + 0.01,
        "time/sampled_tokens_per_second": TOKENS / seconds["sample"],
        "time/tokens_per_second": TOKENS / (sum(seconds.values()) + 0.01),
    }
    return metrics | sample.changes.get(step, {})


def _manifest(sample: TrainingSample) -> TrainingManifest:
    return TrainingManifest(
        tool_version="0.1.0",
        created_at="2026-01-02T03:04:05+00:00",
        command=["mismatch-probe", "train", "--model", sample.model, "--train-dtype", sample.dtype],
        settings=TrainSettings(
            **{
                "model": ModelSettings(path=sample.model),
                "task": TaskSettings(source="sums:terms=3"),
                "train_dtype": sample.dtype,
                "infer_dtype": sample.dtype,
                "steps": sample.steps_asked,
                "seed": sample.seed,
                **sample.settings,
            }
        ),
        model=ModelIdentity(
            name=sample.model,
            folder="/models/demo",
            fingerprint=sample.fingerprint,
            architecture="Qwen3ForCausalLM",
            context_length=2048,
            checkpoint_dtype="bfloat16",
            weight_bytes=3_671_208,
        ),
        content_keys={
            "settings": sample.dtype,
            "model": sample.fingerprint,
            "problems": sample.problems,
            "guards": "2" * 16,
        },
        versions={"python": "3.11.7", "torch": "2.13.0", "vllm": "0.32.0"},
        hardware={"cpu": "a CPU", "cpu_cores": 2, "memory_bytes": 2**34, "gpus": []},
        git=None,
        effective={
            "engine": {"dtype": sample.dtype, "enforce_eager": True, "rope_theta": 10000.0},
            "policy": {"dtype": sample.dtype, "attention": "sdpa", "rope_theta": 10000.0},
        },
        guards=list(sample.guards),
        outcome=sample.outcome,
    )
