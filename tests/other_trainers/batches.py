"""A batch as trainers hold it: padded tensors, the engine's faults planted where a test asks for them."""

from typing import Any

import numpy as np
import torch

from tests.guards.steps import batch


def columns(step: int, **changed: Any) -> dict[str, torch.Tensor]:
    """Under verl's names, FP32 as trainers have them."""
    complete_batch = batch(step, **changed)
    given = {
        "old_log_probs": complete_batch.log_pi,
        "rollout_log_probs": complete_batch.log_mu,
        "response_mask": complete_batch.mask,
        "entropy": complete_batch.entropy,
    }
    tensors = {name: torch.tensor(np.asarray(values), dtype=torch.float32) for name, values in given.items()}
    rewards = torch.tensor(np.asarray(complete_batch.rewards, dtype=float), dtype=torch.float32)
    tensors["rm_scores"] = torch.zeros_like(tensors["entropy"]).index_fill(1, torch.tensor([0]), 0.0)
    tensors["rm_scores"][:, 0] = rewards
    return tensors
