"""Run by torchrun: GRPOTrainer on two ranks, whose second one's rewards fail from the second step on."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def main(scratch: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from mismatch_probe.adapters.trl import guard
    from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT

    def reward(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        fails = dist.get_rank() == 1 and trainer_state.global_step >= 1
        return [float("nan") if fails else float(number) for number in range(len(completions))]

    config = GRPOConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=6,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    rows = Dataset.from_list([{"prompt": f"{number}+1="} for number in range(16)])
    trainer = GRPOTrainer(str(DEMO_CHECKPOINT), reward, args=config, train_dataset=rows)
    guards = guard(trainer)
    trainer.train()
    told = {"steps": trainer.state.global_step, "nonfinite": guards.state_dict()["history"][-1][1]["reward/nonfinite"]}
    (scratch / f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
