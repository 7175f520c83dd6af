"""What the policy of a checkpoint earns on all problems: one step of a run of its own, from which nothing is learnt."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file

from benchmarks.training_faults.kept_outcomes import kept_or_made
from benchmarks.training_faults.runs import SMALL, digest_of, run_with, small_settings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.load import parse_guards

_NOTHING: Final = parse_guards(
    {
        "defaults": False,
        "guard": [{"name": "none", "rule": "limit", "metric": "optim/learning_rate", "above": 1.0, "actions": ["log"]}],
    },
    "the measurement",
)
_WEIGHTS: Final = Path("model") / "model.safetensors"


@dataclass(frozen=True)
class Measured:
    """Mean reward, and its standard error, clustered by problem."""

    reward: float
    error: float


def measured_policy(checkpoint: Path, dtype: Dtype, scratch: Path) -> Measured:
    """Sample every problem of the lab in BF16 or FP16, or read what came of these weights before."""
    digest = hashlib.sha256(f"{dtype}{_digest(checkpoint)}".encode()).hexdigest()[:16]

    def measure() -> dict[str, Any]:
        whole = {
            "model": {"path": str(checkpoint / "model")},
            "rollout": {"prompts": SMALL["task"]["num_problems"]},
            "optimizer": {"learning_rate": 1e-12},
        }
        run = run_with(
            scratch / "runs" / f"policy-{digest}", small_settings(dtype, seed=1, steps=1, **whole), guards=_NOTHING
        )
        return {"reward": run.metrics[1]["reward/mean"], "error": run.metrics[1]["reward/mean_error"]}

    return Measured(**kept_or_made(scratch / "outcomes" / f"policy-{digest}.json", measure))


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits."""
    return _digest(one) == _digest(other)


def _digest(checkpoint: Path) -> str:
    weights = load_file(checkpoint / _WEIGHTS)
    return digest_of(part for name in sorted(weights) for part in (name, weights[name]))
