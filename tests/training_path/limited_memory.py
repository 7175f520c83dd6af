"""`python -m tests.training_path.limited_memory FOLDER WAY LIMIT_MIB OUT`: the reference's scores under a limit.

WAY is `whole` or `by-layer`. LIMIT_MIB bounds what the process may take above its imports, as `ulimit -d` does: what it
allocates, and private maps of files, which is how safetensors reads a shard. 0 is no limit. OUT gets the log-probs, and
stdout what would be chosen, or the sentence that it failed with.
"""

import ctypes
import resource
import sys
from pathlib import Path

import numpy as np

from mismatch_probe.config.model import ReferenceSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import OutOfMemory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.by_layer_model import why_by_layer
from mismatch_probe.training_path.by_layer_scorer import HiddenStates, LayerByLayerScorer

M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**20
"""Matrices are mapped one by one, as those of a large checkpoint are anyway, so that what is freed is given back."""
SEQUENCES = [TokenSequence(f"s{row}", [1, 2], [index * 37 % 256 for index in range(30 + row)]) for row in range(6)]


def limit(mib: int) -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + mib * 2**20,) * 2)


def scores(folder: Path, way: str, hidden: Path) -> list[ScoredSequence]:
    settings = TrainingPathSettings()
    if way == "whole":
        with Scorer.load(folder, Dtype.FP32, settings, reference=True) as scorer:
            return scorer.score_batch(SEQUENCES)
    with LayerByLayerScorer.load_layered(folder, Dtype.FP32, settings, why="asked for") as layered:
        states = HiddenStates(hidden, in_memory=False)
        (batch,) = layered.score_batches({0: SEQUENCES}, states, lambda done, of: None)
        return batch.scores


def main(folder: Path, way: str, mib: int, out: Path) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    if mib:
        limit(mib)
    print(why_by_layer(folder, Dtype.FP32, TrainingPathSettings(), ReferenceSettings()))
    try:
        scored = scores(folder, way, out.with_suffix(".hidden"))
    except OutOfMemory as error:
        print(error)
    else:
        np.save(out, np.concatenate([row.logprobs for row in scored]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
