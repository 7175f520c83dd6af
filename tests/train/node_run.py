"""A short run on every rank of torchrun, on one node or several; the last rank may be killed before its third step.

python -m tests.train.node_run CHECKPOINT SCRATCH STEPS start|resume killed|whole
"""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mismatch_probe.errors import MismatchProbeError
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.train.distributed import rank, world_size
from mismatch_probe.train.preparation import prepare_training
from mismatch_probe.train.run import execute_training, resume_training, start_training
from tests.train.quick_runs import quick_home, quick_settings
from tests.train.slow_rank import RankEngine

KILLED_IN = 3


def main(checkpoint: str, scratch: str, steps: str, how: str, end: str) -> None:
    home = Path(scratch) / "home"
    home.mkdir(exist_ok=True)

    def listen(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        if end == "killed" and step == KILLED_IN - 1 and rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        quick_home(home, patch, RankEngine)
        preparation = prepare_training(quick_settings(Path(checkpoint), home, int(steps), policy={"device": "cpu"}))
        begin = start_training if how == "start" else resume_training
        try:
            execute_training(begin(Path(scratch) / "run", preparation), preparation, listen)
        except MismatchProbeError as error:
            print(f"mismatch-probe: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
