"""`python -m tests.training_path.limited_addresses FOLDER`: what scoring says that runs out of the host's memory."""

import resource
import sys
from pathlib import Path

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import OutOfMemory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer


def main(folder: Path) -> None:
    settings = TrainingPathSettings(attention="eager", batch_tokens=8192)
    with Scorer.load(folder, Dtype.FP32, settings) as scorer:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
        try:
            scorer.score_batch([TokenSequence("long", [1], [2] * 8000)])
        except OutOfMemory as error:
            print(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
