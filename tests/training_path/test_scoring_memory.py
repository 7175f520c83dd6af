"""Memory above the model at a vocabulary of 152k and a sequence of 8k tokens, 2k of them its response.

Each case is a process of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from tests.tiny_models import make_checkpoint

LIMIT_MIB = 512
"""Less than half of the response's logits in FP32, and an eighth of the sequence's."""
SCRIPT = """
import sys
from pathlib import Path
import torch
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer

def resident_mib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024

torch.set_num_threads(1)
folder, dtype, reference = sys.argv[1:]
with Scorer.load(folder, Dtype.parse(dtype), TrainingPathSettings(), reference=reference == "reference") as scorer:
    scorer.score_batch([TokenSequence("warm", [1], [2, 3])])
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    ids = [index * 37 % 152_000 for index in range(8192)]
    scorer.score_batch([TokenSequence("long", ids[:6144], ids[6144:])])
    print(resident_mib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("family", "dtype", "side"),
    [
        ("llama", Dtype.FP16, "pi"),
        ("mistral-sliding", Dtype.FP32, "pi"),
        ("mistral-sliding", Dtype.FP32, "reference"),
    ],
)
def test_scoring_8k_tokens_over_152k_words_stays_under_the_limit(
    family: str, dtype: Dtype, side: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, vocab_size=152_000, max_position_embeddings=8192)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), dtype, side], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < LIMIT_MIB
