"""`python -m tests.training_path.peak_memory FOLDER DTYPE SIDE`: MiB that scoring a long sequence takes at most.

SIDE is pi or reference. The sequence has 8k tokens over a vocabulary of 152k, 1k of them its response.
"""

import sys
from pathlib import Path

import torch

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def main(folder: Path, dtype: Dtype, reference: bool) -> None:
    torch.set_num_threads(1)
    with Scorer.load(folder, dtype, TrainingPathSettings(), reference=reference) as scorer:
        scorer.score_batch([TokenSequence("warm", [1], [2, 3])])
        before = resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        ids = [index * 37 % 152_000 for index in range(8192)]
        scorer.score_batch([TokenSequence("long", ids[:7168], ids[7168:])])
        print(resident_mib("VmHWM") - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Dtype.parse(sys.argv[2]), sys.argv[3] == "reference")
