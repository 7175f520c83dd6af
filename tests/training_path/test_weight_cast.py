from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.training_path.fit import held_weights, measure_weight_cast
from tests.tiny_models import make_checkpoint


def test_weights_of_bf16_are_exact_in_bf16_and_wider_formats_only() -> None:
    weights = [torch.linspace(-2, 2, 1000).bfloat16().float()]
    assert measure_weight_cast(weights, Dtype.BF16).is_exact
    assert measure_weight_cast(weights, Dtype.FP32).is_exact
    assert measure_weight_cast([torch.linspace(-2, 2, 1000)], Dtype.FP16).num_changed > 900


def test_what_a_cast_to_fp16_loses_is_counted() -> None:
    cast = measure_weight_cast([torch.tensor([1.0, 1 + 2**-12, 1e6, 1e-9, 0.0, float("nan")])], Dtype.FP16)
    assert (cast.num_weights, cast.num_changed, cast.num_overflowed, cast.num_flushed) == (6, 3, 1, 1)
    assert cast.max_abs_error == pytest.approx(2**-12)
    assert cast.as_dict()["changed_share"] == pytest.approx(0.5)


def test_integer_tensors_are_no_weights() -> None:
    assert measure_weight_cast([torch.arange(10)], Dtype.BF16).num_weights == 0


def test_shards_are_all_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    weights_in_one_file, sharded = (
        held_weights(path, TrainingPathSettings()) for path in (folder, tmp_path / "sharded")
    )
    assert weights_in_one_file is not None
    assert sharded is not None
    assert measure_weight_cast(weights_in_one_file, Dtype.FP16) == measure_weight_cast(sharded, Dtype.FP16)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="safetensors"):
        held_weights(tmp_path, TrainingPathSettings())


def test_weights_in_8_bit_are_exact_in_16() -> None:
    weights = torch.linspace(-4, 4, 101).to(torch.float8_e4m3fn)
    for dtype in (Dtype.BF16, Dtype.FP16):
        cast = measure_weight_cast([weights], dtype)
        assert (cast.num_weights, cast.is_exact) == (101, True)
