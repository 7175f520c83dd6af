"""The training path on a checkpoint that stores quantised weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Linear

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.training_path.loading import require_expanded
from mismatch_probe.training_path.scorer import Scorer
from tests.tiny_models import make_checkpoint, quantise_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    return quantise_blocks(make_checkpoint(tmp_path / "fp8", "llama", **SHAPE))


def load(folder: Path, *, reference: bool = False, device: str = "cpu") -> Scorer:
    return Scorer.load(folder, Dtype.FP32, TrainingPathSettings(device=device), reference=reference)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_the_reference_of_quantised_weights_computes_with_them_expanded(quantised: Path, device: str) -> None:
    with load(quantised, reference=True, device=device) as scorer:
        settings = scorer.effective_settings()
        assert (settings["dtype"], settings["quantized"]["expanded"]) == ("fp32", True)


def pack_to_two_bits(folder: Path) -> Path:
    """As BitNet's checkpoints are stored, which transformers computes with as they are packed, on a CPU too."""
    from transformers.integrations.bitnet import pack_weights  # as it is imported, PyTorch warns

    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            stored[name] = pack_weights(weight.sign())
            stored[f"{name}_scale"] = weight.abs().mean().reshape(1)
        else:
            stored[name] = weight
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_reference_of_weights_that_stay_packed_is_refused_and_pi_computes_with_them(tmp_path: Path) -> None:
    packed = pack_to_two_bits(make_checkpoint(tmp_path / "two-bits", "llama"))
    with pytest.raises(UsageError, match=r"keeps the weights .* quantised, .*q_proj, a BitLinear.*--reference none"):
        load(packed, reference=True)
    with load(packed) as scorer:
        assert scorer.effective_settings()["quantized"]["expanded"] is False


def in_fp8(module: torch.nn.Module) -> None:
    module.o_proj = FP8Linear(128, 128, block_size=(128, 128))


def with_scales_left_out(module: torch.nn.Module) -> None:
    module.o_proj.weight.data = module.o_proj.weight.data.to(torch.float8_e4m3fn)


def in_packed_integers(module: torch.nn.Module) -> None:
    module.o_proj.register_buffer("qweight", torch.zeros(16, 128, dtype=torch.int32))


def in_eight_bits(module: torch.nn.Module) -> None:
    weight = module.o_proj.weight.data.char()
    module.o_proj.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("plant", [in_fp8, with_scales_left_out, in_packed_integers, in_eight_bits])
def test_a_single_module_that_stays_quantised_is_seen(
    quantised: Path, plant: Callable[[torch.nn.Module], None]
) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    require_expanded(quantised, model)
    plant(model.model.layers[1].self_attn)
    with pytest.raises(UsageError, match=r"such as model\.layers\.1\.self_attn\.o_proj"):
        require_expanded(quantised, model)
