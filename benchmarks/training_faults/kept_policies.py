"""What the policy of a checkpoint earns on all problems: the responses of a step that learns nothing from them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file

from benchmarks.training_faults.kept_outcomes import kept_or_made
from benchmarks.training_faults.runs import SMALL, small_settings
from benchmarks.training_faults.watching import weights_digest
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.batch import Batch
from mismatch_probe.train.distributed import join_process_group
from mismatch_probe.train.learner import Adjustments
from mismatch_probe.train.parts import assemble
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.training_path.loading import choose_device

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
        policy_settings = {
            "model": {"path": str(checkpoint / "model")},
            "rollout": {"prompts": SMALL["task"]["num_problems"]},
        }
        preparation = prepare_training(small_settings(dtype, seed=1, steps=1, **policy_settings))
        join_process_group(choose_device(preparation.settings.policy.device))
        with assemble(preparation, Adjustments()) as parts:
            parts.sync.send()
            rollouts = parts.rollouts.sample(0)
        batch = Batch(
            log_mu=[rollout.mu_logprobs for rollout in rollouts],
            prompt_ids=[rollout.prompt_id for rollout in rollouts],
            rewards=[rollout.reward for rollout in rollouts],
        )
        earned = batch.measure().metrics()
        return {"reward": earned["reward/mean"], "error": earned["reward/mean_error"]}

    return Measured(**kept_or_made(scratch / "outcomes" / f"policy-{digest}.json", measure))


def same_weights(first: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits."""
    return _digest(first) == _digest(other)


def _digest(checkpoint: Path) -> str:
    return weights_digest(load_file(checkpoint / _WEIGHTS))
