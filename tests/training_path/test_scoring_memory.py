"""Memory above the model at a vocabulary of 152k and a sequence of 8k tokens; each case is a process of its own."""

from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from tests.tiny_models import make_checkpoint
from tests.warm_python import warm_python

LIMIT_MIB = 512
"""Less than the logits of the response in FP32, which a log-softmax copies twice, and an eighth of the sequence's."""


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
    answer = warm_python("tests.training_path.peak_memory", folder, dtype, side)
    assert float(answer.stdout) < LIMIT_MIB
