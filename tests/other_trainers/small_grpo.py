"""TRL's GRPOTrainer on the demo checkpoint, small enough for a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT

STEPS: Final = 6


def grpo_trainer(folder: Path, reward: Callable[..., list[float]], **given: Any) -> Any:
    """Of `STEPS` steps; `given` are settings of TRL's that replace these."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
    }
    return GRPOTrainer(
        str(DEMO_CHECKPOINT),
        reward,
        args=GRPOConfig(output_dir=str(folder), **settings | given),
        train_dataset=Dataset.from_list([{"prompt": f"{number}+1="} for number in range(8)]),
    )
