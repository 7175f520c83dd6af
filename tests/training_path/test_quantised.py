"""The training path on a checkpoint that stores quantised weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.training_path.scorer import Scorer
from tests.tiny_models import make_checkpoint, quantise_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    return quantise_blocks(make_checkpoint(tmp_path / "fp8", "llama", **SHAPE))


def load(folder: Path) -> Scorer:
    return Scorer.load(folder, Dtype.FP32, TrainingPathSettings(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies in FP8")
def test_quantised_weights_are_expanded_with_their_scales_and_that_is_said(quantised: Path) -> None:
    with load(quantised) as scorer:
        facts = scorer.effective_settings()["quantized"]
        assert (facts["source"], facts["expanded"]) == ("checkpoint", True)
        assert scorer.weight_cast is None, "no file holds what the model holds"


def test_weights_without_their_scales_are_refused(quantised: Path) -> None:
    """transformers knows the scales by another name only, and would drop these without a word."""
    path = quantised / "model.safetensors"
    renamed = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"leaves out 14 tensors of them.*weight_scale: without these"):
        load(quantised)
