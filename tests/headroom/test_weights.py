from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.headroom import findings as findings_module
from mismatch_probe.headroom.findings import scan_weights
from mismatch_probe.headroom.judge import judge_weights
from mismatch_probe.provenance.checkpoint import weight_files
from mismatch_probe.training_path.fit import measure_weight_cast, stored_tensors
from tests.headroom.planted import planted
from tests.tiny_models import make_checkpoint


def stored(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_fate_of_a_weight_is_counted(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -65504.0, 65520.0, 1e6, 3e-5, -1e-7, 6e-8, 2e-8, 0.0, float("inf"), float("nan")])
    total = scan_weights(stored(tmp_path, w=values)).total
    assert total.num_values == 11
    assert total.num_overflowed == 2
    assert total.num_subnormal == 3
    assert total.num_flushed == 1
    assert total.num_nonfinite == 2
    assert total.largest == 1e6


def test_rounding_error_is_that_of_fp16(tmp_path: Path) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    total = scan_weights(stored(tmp_path, w=values)).total
    expected = (values.half().double() - values.double()).norm() / values.double().norm()
    assert total.relative_error == pytest.approx(float(expected))
    assert 2.0**-14 < total.relative_error < 2.0**-11


def test_the_error_of_weights_too_small_for_a_square_is_not_lost(tmp_path: Path) -> None:
    assert scan_weights(stored(tmp_path, w=torch.full((10,), 1e-30))).total.relative_error == 1


def test_slices_add_up_to_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(37, 8, generator=torch.Generator().manual_seed(0)) * 2.0**-13
    scan_of_one_file = scan_weights(stored(tmp_path, w=values))
    monkeypatch.setattr(findings_module, "_SLICE_VALUES", 24)
    sliced = scan_weights(tmp_path)
    assert sliced.total.num_subnormal == scan_of_one_file.total.num_subnormal > 0
    assert sliced.total.relative_error == pytest.approx(scan_of_one_file.total.relative_error)
    assert sliced.total.num_values == 37 * 8


def test_no_more_than_a_slice_is_ever_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings_module, "_SLICE_VALUES", 100)
    seen: list[int] = []
    real = findings_module.measure_weight_cast

    def watching(slices: object, dtype: object) -> object:
        return real((seen.append(one.numel()) or one for one in slices), dtype)  # type: ignore[attr-defined]

    monkeypatch.setattr(findings_module, "measure_weight_cast", watching)
    scan_weights(stored(tmp_path, w=torch.ones(1000, 10), tiny=torch.ones(())))
    assert max(seen) == 100
    assert sum(seen) == 10_001


def test_shards_are_all_read_and_agree_with_the_weight_cast(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    scan_of_one_file, sharded = scan_weights(folder), scan_weights(tmp_path / "sharded")
    assert sharded.total.num_values == scan_of_one_file.total.num_values
    assert sharded.num_tensors == scan_of_one_file.num_tensors
    cast = measure_weight_cast(stored_tensors(weight_files(folder)), Dtype.FP16)
    assert (scan_of_one_file.total.num_values, scan_of_one_file.total.num_flushed) == (
        cast.num_weights,
        cast.num_flushed,
    )


def test_a_quantised_tensor_is_refused_in_a_sentence(tmp_path: Path) -> None:
    stored(tmp_path, w=torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(UsageError, match=r"tensor w .* F8_E4M3, a quantised format"):
        scan_weights(tmp_path)


def test_weights_past_65504_are_named(tmp_path: Path) -> None:
    def one_large(weights: torch.Tensor) -> torch.Tensor:
        weights[3, 5] = 1e5
        return weights

    found = scan_weights(planted(tmp_path / "m", changes={"layers.1.mlp.up_proj": one_large}))
    assert found.worst[0].tensor == "model.layers.1.mlp.up_proj.weight"
    assert found.worst[0].num_overflowed == 1
    verdict = judge_weights(found)
    assert verdict.code == HeadroomCode.FITS_EXCEPT
    assert "model.layers.1.mlp.up_proj.weight, which overflow FP16" in verdict.sentence


def test_weights_that_vanish_are_named(tmp_path: Path) -> None:
    weights = scan_weights(planted(tmp_path / "m", changes={"layers.0.self_attn.k_proj": 2.0**-25}))
    worst = weights.worst[0]
    assert worst.tensor == "model.layers.0.self_attn.k_proj.weight"
    assert worst.num_flushed > 0.9 * worst.num_values
    verdict = judge_weights(weights)
    assert verdict.code == HeadroomCode.FITS_EXCEPT
    assert "too small for FP16" in verdict.sentence


def test_a_tensor_too_small_is_not_hidden_by_tensors_with_single_lost_weights(tmp_path: Path) -> None:
    def with_one_lost() -> torch.Tensor:
        return torch.cat([torch.full((1,), 1e-9), torch.linspace(0.1, 0.2, 99)])

    ordinary = {f"layers.{number}": with_one_lost() for number in range(9)}
    verdict = judge_weights(scan_weights(stored(tmp_path, norm=torch.linspace(1e-6, 2e-6, 64), **ordinary)))
    assert verdict.code == HeadroomCode.FITS_EXCEPT
    assert verdict.sentence.startswith("The weights fit FP16 except norm, which are too small")


def test_every_tensor_that_overflows_is_counted(tmp_path: Path) -> None:
    large = {f"layers.{number:02d}": torch.full((4,), 1e6) for number in range(20)}
    verdict = judge_weights(scan_weights(stored(tmp_path, **large)))
    assert "layers.00, layers.01, layers.02 and 17 more, which overflow" in verdict.sentence


def test_each_tensor_is_told_its_own_trouble(tmp_path: Path) -> None:
    folder = stored(tmp_path, large=torch.full((4,), 1e6), small=torch.linspace(1e-6, 2e-6, 64), fine=torch.ones(4))
    sentence = judge_weights(scan_weights(folder)).sentence
    assert "except large, which overflow FP16, and small, which are too small" in sentence


def test_packed_weights_of_a_quantised_checkpoint_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, qweight=torch.ones(4, dtype=torch.int32), scales=torch.ones(4))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(UsageError, match=r"tensor qweight .* I32, a quantised format"):
        scan_weights(tmp_path)


def test_positions_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert scan_weights(stored(tmp_path, positions=torch.arange(4), w=torch.ones(4))).num_tensors == 1


def test_a_checkpoint_without_weights_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no floating-point weights"):
        scan_weights(stored(tmp_path, positions=torch.arange(4)))


def test_a_damaged_checkpoint_fits_no_format(tmp_path: Path) -> None:
    folder = planted(tmp_path / "m", changes={"layers.0.mlp.up_proj": float("nan")})
    verdict = judge_weights(scan_weights(folder))
    assert verdict.code == HeadroomCode.DOES_NOT_FIT
    assert "model.layers.0.mlp.up_proj.weight" in verdict.sentence


def test_ordinary_weights_are_not_accused(tmp_path: Path) -> None:
    verdict = judge_weights(scan_weights(make_checkpoint(tmp_path / "m")))
    assert verdict.code == HeadroomCode.FITS
