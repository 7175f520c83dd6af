"""A short run in which the second rank measures slowly, on every rank that torchrun starts: what guards decided there.

python -m tests.train.slow_rank CHECKPOINT SCRATCH
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.train.distributed import rank
from mismatch_probe.train.parts import response_metrics
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import execute_training, start_training
from tests.train.quick_runs import StoppingEngine, guard_file, quick_home, quick_settings

STEPS = 2
SLOW_SECONDS = 1.5
LATE = 'name = "late"\nrule = "limit"\nmetric = "time/measure_seconds"\nabove = 0.75\nactions = ["skip_update"]'


class RankEngine(StoppingEngine):
    """One for each rank."""

    def effective_settings(self) -> dict[str, Any]:
        return {**super().effective_settings(), "tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def slowly(*given: Any) -> Metrics:
    time.sleep(SLOW_SECONDS * rank())
    return response_metrics(*given)


def main(checkpoint: str, scratch: str) -> None:
    home = Path(scratch) / f"rank-{rank()}"
    home.mkdir()
    decided: list[list[str]] = []

    def listen(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        decided.append([str(action) for action in decision.actions])

    with pytest.MonkeyPatch.context() as patch:
        quick_home(home, patch, RankEngine)
        patch.setattr("mismatch_probe.train.trainer.response_metrics", slowly)
        wanted = quick_settings(Path(checkpoint), home, STEPS, policy={"device": "cpu"}, guards=guard_file(home, LATE))
        preparation = prepare_training(wanted)
        execute_training(start_training(Path(scratch) / "run", preparation), preparation, listen)
    (Path(scratch) / f"decided-{rank()}.json").write_text(json.dumps(decided), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
