from pathlib import Path

import pytest
import torch

from mismatch_probe.config.examinations import HeadroomSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.headroom.ranges import ForwardRanges, Operation, OperationWatch
from mismatch_probe.training_path.inside import fp32_parts
from tests.tiny_models import make_checkpoint

IDS = torch.arange(24).reshape(2, 12)


def seen(folder: Path, dtype: Dtype, attention: str) -> ForwardRanges:
    model = fp32_parts.load_in_format(
        folder, dtype, HeadroomSettings(model=ModelSettings(path="tiny")), attention=attention
    )
    ranges = ForwardRanges()
    with torch.no_grad(), OperationWatch(model, ranges.see):
        model(input_ids=IDS, use_cache=False)
    return ranges


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "gemma2"])
def test_the_same_operations_are_seen_in_both_formats(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    fp32, fp16 = seen(folder, Dtype.FP32, "eager"), seen(folder, Dtype.FP16, "eager")
    assert list(fp16.formats) == list(fp32.formats)
    largest, low = fp32.largest(), fp16.largest()
    for operation, value in largest.items():
        assert low[operation] == pytest.approx(value, rel=0.05, abs=0.05), operation


def test_the_mask_of_attention_is_no_magnitude(tmp_path: Path) -> None:
    ranges = seen(make_checkpoint(tmp_path / "m"), Dtype.FP32, "eager")
    assert max(ranges.largest().values()) < 1e4
    scores = ranges.largest()[Operation("model.layers.0.self_attn", "softmax input", 0)]
    assert 0.1 < scores < 100


def test_norms_are_in_fp32_and_products_in_fp16(tmp_path: Path) -> None:
    formats = seen(make_checkpoint(tmp_path / "m"), Dtype.FP16, "sdpa").formats
    assert formats[Operation("model.norm", "pow", 0)] == torch.float32
    assert formats[Operation("model.layers.1.mlp.down_proj", "linear", 0)] == torch.float16
    assert formats[Operation("model.layers.1", "add", 0)] == torch.float16
    assert not any(operation.function == "softmax input" for operation in formats), (
        "fused attention keeps its scores to itself"
    )


def test_the_magnitude_is_that_of_the_modules_own_result(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    model = fp32_parts.load_in_format(folder, Dtype.FP32, HeadroomSettings(model=ModelSettings(path="tiny")))
    outputs: list[torch.Tensor] = []
    module = model.get_submodule("model.layers.1.mlp.down_proj")
    handle = module.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    handle.remove()
    largest = seen(folder, Dtype.FP32, "sdpa").largest()[Operation("model.layers.1.mlp.down_proj", "linear", 0)]
    assert largest == pytest.approx(float(outputs[0].abs().max()), rel=1e-5)


def test_nothing_is_watched_afterwards(tmp_path: Path) -> None:
    model = fp32_parts.load_in_format(
        make_checkpoint(tmp_path / "m"), Dtype.FP32, HeadroomSettings(model=ModelSettings(path="tiny"))
    )
    ranges = ForwardRanges()
    with torch.no_grad(), OperationWatch(model, ranges.see):
        pass
    model(input_ids=IDS, use_cache=False)
    assert not ranges.formats
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
