"""TRL's GRPOTrainer under guards on every rank that torchrun starts: what each rank decided, logged, and ended with.

python -m tests.other_trainers.trl_on_ranks FAULT FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch

from mismatch_probe.adapters.trl import guard
from mismatch_probe.engines.weight_digests import weight_digest
from mismatch_probe.errors import MismatchProbeError
from tests.other_trainers.small_grpo import grpo_trainer

RANK: Final = int(os.environ["RANK"])
FAULT_AT: Final = 3
"""Of the second rank alone."""


def main(fault: str, folder: Path) -> None:
    def reward(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        rewards = [float(RANK + number) for number in range(len(completions))]
        return [float("nan"), *rewards[1:]] if fault == "reward" and spoiled(trainer_state) else rewards

    trainer = grpo_trainer(folder, reward, save_strategy="steps", save_steps=2, max_steps=8)
    step = trainer.training_step

    def spoiled_step(*given: Any, **named: Any) -> Any:
        loss = step(*given, **named)
        return loss * float("nan") if fault == "loss" and spoiled(trainer.state) else loss

    trainer.training_step = spoiled_step
    guards = guard(trainer)
    observe, decisions = guards.observe, list[dict[str, Any]]()

    def recorded(*given: Any, **named: Any) -> Any:
        decision = observe(*given, **named)
        fired = [event.guard for event in decision.events]
        answer = {name: repr(value) for name, value in decision.metrics.items()}
        decisions.append({"fired": fired, "skip": decision.skip, "stop": decision.stop, "metrics": answer})
        return decision

    guards.observe = recorded  # type: ignore[method-assign]
    weights = [digest(trainer)]
    trainer.add_callback(after_each_step(lambda: weights.append(digest(trainer))))
    ended = ""
    try:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if fault == "resumed" else None)
    except MismatchProbeError as error:
        ended = str(error)
    answer = {
        "ended": ended,
        "ranks": trainer.accelerator.num_processes,
        "decisions": decisions,
        "weights": weights,
        "rewards": [log["reward"] for log in trainer.state.log_history if "reward" in log],
        "state": guards.state_dict(),
    }
    (folder / f"{fault}-{RANK}.json").write_text(json.dumps(answer), encoding="utf-8")


def spoiled(state: Any) -> bool:
    return RANK == 1 and state.global_step + 1 >= FAULT_AT


def digest(trainer: Any) -> int:
    return sum(int(weight_digest(parameter)) for parameter in trainer.model.parameters())


def after_each_step(do: Any) -> Any:
    from transformers import TrainerCallback

    class After(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            do()

    return After()


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], Path(sys.argv[2]))
