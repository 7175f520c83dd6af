"""`python -m benchmarks.sizing.child FOLDER WAY`: what one way of the reference takes, as JSON on stdout.

WAY is `whole` or `by-layer`. peak_bytes: anonymous memory above what the imports take, which is what a process cannot
give back; pages of files are not in it.
"""

import json
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from mismatch_probe.host import prepare_process

prepare_process()

from mismatch_probe.config.model import TrainingPathSettings  # noqa: E402
from mismatch_probe.dtypes import Dtype  # noqa: E402
from mismatch_probe.records.sequences import TokenSequence  # noqa: E402
from mismatch_probe.training_path import Scorer, plan_batches  # noqa: E402
from mismatch_probe.training_path.by_layer_scorer import (  # noqa: E402
    HiddenStates,
    LayerByLayerScorer,
)

READY_SECONDS = time.time() - psutil.Process().create_time()
"""Since the process began; all is imported by now."""
PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 32, 96
BATCH_TOKENS = 512
_POLL_SECONDS = 0.005


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory seen from now on."""

    def __init__(self) -> None:
        self._before = self._most = anonymous_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, anonymous_bytes())
            time.sleep(_POLL_SECONDS)

    @property
    def bytes(self) -> int:
        return self._most - self._before


def main(folder: Path, way: str) -> None:
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    sequences = [
        TokenSequence(f"s{row}", [row + 1], [(row + 37 * at) % 8192 for at in range(length - 1)])
        for row in range(PROMPTS)
    ]
    rows = plan_batches([length] * PROMPTS, BATCH_TOKENS)
    batches = {number: [sequences[row] for row in batch] for number, batch in enumerate(rows)}
    settings = TrainingPathSettings(device="cpu", batch_tokens=BATCH_TOKENS)
    peak, began = Peak(), time.monotonic()
    if way == "whole":
        scorer = Scorer.load(folder, Dtype.FP32, settings, reference=True)
        loaded = time.monotonic()
        for batch in batches.values():
            scorer.score_batch(batch)
    else:
        layered = LayerByLayerScorer.load_layered(folder, Dtype.FP32, settings, why="measured")
        loaded = time.monotonic()
        with TemporaryDirectory() as hidden:
            states = HiddenStates(Path(hidden), in_memory=True)
            list(layered.score_batches(batches, states, lambda done, of: None))
    ended = time.monotonic()
    taken = {"load_seconds": loaded - began, "score_seconds": ended - loaded}
    print(json.dumps({"ready_seconds": READY_SECONDS, **taken, "peak_bytes": peak.bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
