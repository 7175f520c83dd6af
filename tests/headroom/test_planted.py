"""A lack of headroom is planted and found before any training; a model that fits is not accused."""

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.fp16_overflow import GRADIENT_TIMES
from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.config.examinations import HeadroomPrompts, HeadroomSampling
from mismatch_probe.errors import BrokenRecord, ExitCode
from mismatch_probe.headroom import passes
from mismatch_probe.records.examinations import Headroom
from tests.headroom.planted import examined, planted
from tests.tiny_models import FAMILIES, make_checkpoint

pytestmark = pytest.mark.slow

Examination = Callable[[float], Headroom]
FITS = (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)


@pytest.fixture(scope="module")
def examination(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    """The examination of a tiny model whose head and last norm are this many times as large, made once."""

    @cache
    def headroom(times: float) -> Headroom:
        return examined(with_other_head(tmp_path_factory.mktemp("head"), times))

    return headroom


def with_other_head(folder: Path, times: float) -> Path:
    return planted(folder / "m", changes={"lm_head": times, "model.norm": times})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_ordinary_model_is_not_accused(tmp_path: Path, family: str, attention: str) -> None:
    headroom = examined(make_checkpoint(tmp_path / family, family), attention=attention)
    assert headroom.verdict.code in FITS
    assert headroom.exit_code == ExitCode.PASS
    assert headroom.advised is None
    assert headroom.plain is not None
    assert headroom.bf16 is not None
    assert headroom.plain.logprob_error_nats is not None
    assert headroom.bf16.logprob_error_nats is not None
    assert 0 < headroom.plain.logprob_error_nats < headroom.bf16.logprob_error_nats
    assert headroom.activations is not None
    assert all(activation.finite_in_fp16 for activation in headroom.activations.tightest)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("family", "tensor", "module", "operation"),
    [
        ("llama", "mlp.down_proj", "mlp.down_proj", "linear"),
        ("qwen2", "self_attn.o_proj", "self_attn.o_proj", "linear"),
        ("gemma2", "post_feedforward_layernorm", "post_feedforward_layernorm", "type_as"),
        ("qwen3-moe", "mlp.experts.2.down_proj", "mlp.experts", "_grouped_mm"),
    ],
)
def test_an_activation_past_65504_is_named_at_its_layer(
    tmp_path: Path, layer: int, family: str, tensor: str, module: str, operation: str
) -> None:
    change = (lambda weights: weights + 2.0**15) if "norm" in tensor else 2.0**16
    headroom = examined(planted(tmp_path / "m", family, changes={f"layers.{layer}.{tensor}": change}))
    assert headroom.verdict.code == HeadroomCode.FITS_EXCEPT
    assert headroom.plain is not None
    assert headroom.plain.first_nonfinite is not None
    assert headroom.plain.first_nonfinite.startswith(f"model.layers.{layer}.{module} ({operation}")
    assert f"overflow FP16, first at {headroom.plain.first_nonfinite}" in headroom.verdict.sentence
    assert headroom.activations is not None
    residual = {layer.layer: layer.residual for layer in headroom.activations.layers}[f"model.layers.{layer}"]
    assert residual is not None
    assert residual > 65504


def test_the_advice_was_tried_and_is_as_close_to_fp32_as_fp16_is(tmp_path: Path) -> None:
    messages: list[tuple[str, int, int, str]] = []
    folder = planted(tmp_path / "m", changes={"layers.1.mlp.down_proj": 2.0**16})
    headroom = examined(folder, tell=lambda *how_far: messages.append(how_far))
    assert [number for _, number, _, how_far in messages if not how_far] == [1, 2, 3, 4, 5, 6, 7]
    last = [[how_far for _, number, _, how_far in messages if number == stage][-1] for stage in range(1, 8)]
    assert re.fullmatch(r"(\d+) of \1 tensors", last[0])
    assert last[1:7] == ["2 of 2 prompts", *["1 of 1 batches"] * 5]
    tries = [(doing, of) for doing, number, of, how_far in messages if number == 7 and how_far]
    assert re.fullmatch(r"FP16 with modules in FP32, try \d of at most 8, gradients at \d loss scales", tries[-1][0])
    assert {of for _, _, of, _ in messages[:3]} == {6}, "a seventh part comes only where FP16 does not fit"
    assert tries[-1][1] == 7
    assert headroom.advised is not None
    assert headroom.bf16 is not None
    assert headroom.advised.modules_in_fp32 == ["model.layers.1.mlp.down_proj"]
    assert headroom.advised.residual_in_fp32_from == "model.layers.1"
    assert headroom.advised.first_nonfinite is None
    assert headroom.advised.logprob_error_nats is not None
    assert headroom.bf16.logprob_error_nats is not None
    assert headroom.advised.logprob_error_nats < headroom.bf16.logprob_error_nats / 2
    assert headroom.advised.from_exponent is not None
    assert "the residual stream from model.layers.1 on and model.layers.1.mlp.down_proj" in headroom.verdict.sentence


def test_a_product_inside_the_mlp_overflows_though_nothing_around_it_does(tmp_path: Path) -> None:
    changes = {"layers.0.mlp.gate_proj": 2.0**8, "layers.0.mlp.up_proj": 2.0**8, "layers.0.mlp.down_proj": 2.0**-14}
    headroom = examined(planted(tmp_path / "m", changes=changes))
    assert headroom.verdict.code == HeadroomCode.FITS_EXCEPT
    assert headroom.plain is not None
    assert headroom.plain.first_nonfinite == "model.layers.0.mlp (mul)"
    assert headroom.advised is not None
    assert headroom.advised.modules_in_fp32 == ["model.layers.0.mlp"]


def test_a_backward_pass_that_overflows_is_told_though_the_loss_is_finite(tmp_path: Path) -> None:
    headroom = examined(planted(tmp_path / "m", changes=GRADIENT_TIMES))
    assert headroom.plain is not None
    assert headroom.plain.first_nonfinite is None
    assert headroom.plain.logprob_error_nats is not None
    assert all(scale.relative_error is None and scale.num_nonfinite > 0 for scale in headroom.plain.scales)
    assert "backward pass overflows at every loss scale; the largest gradient is at model.layers.1.mlp (mul)" in (
        headroom.verdict.sentence
    )
    assert headroom.advised is not None
    assert "model.layers.1.mlp" in headroom.advised.modules_in_fp32
    assert headroom.advised.from_exponent is not None


def test_a_weight_past_65504_is_mended_by_its_module_in_fp32(tmp_path: Path) -> None:
    def one_large(weights: torch.Tensor) -> torch.Tensor:
        weights[3, 5] = 1e5
        return weights

    headroom = examined(planted(tmp_path / "m", changes={"layers.0.mlp.up_proj": one_large}))
    assert headroom.weights.total.num_overflowed == 1
    assert headroom.verdict.code == HeadroomCode.FITS_EXCEPT
    assert headroom.advised is not None
    assert "model.layers.0.mlp" in headroom.advised.modules_in_fp32


def test_a_weight_past_65504_that_no_response_came_by_is_told(tmp_path: Path) -> None:
    def one_large(weights: torch.Tensor) -> torch.Tensor:
        weights[319, 5] = 1e5
        return weights

    headroom = examined(planted(tmp_path / "m", changes={"embed_tokens": one_large}))
    assert headroom.plain is not None
    assert headroom.plain.first_nonfinite is None
    assert headroom.verdict.code == HeadroomCode.FITS_EXCEPT
    assert headroom.verdict.sentence.startswith("Weights of model.embed_tokens overflow FP16.")
    assert headroom.advised is not None
    assert headroom.advised.modules_in_fp32 == ["model.embed_tokens"]


def test_weights_that_vanish_are_found_by_what_they_do_to_log_probs(tmp_path: Path) -> None:
    changes = {"layers.0.mlp.gate_proj": 2.0**-23, "layers.0.mlp.up_proj": 2.0**13, "layers.0.mlp.down_proj": 2.0**10}
    headroom = examined(planted(tmp_path / "m", changes=changes))
    assert headroom.weights.worst[0].tensor == "model.layers.0.mlp.gate_proj.weight"
    assert headroom.verdict.code == HeadroomCode.FITS_EXCEPT
    assert "further from FP32 than BF16's" in headroom.verdict.sentence
    assert headroom.advised is not None
    assert "model.layers.0.mlp.gate_proj" in headroom.advised.modules_in_fp32


def test_what_would_need_most_of_the_model_in_fp32_does_not_fit(tmp_path: Path) -> None:
    changes = {"gate_proj": 2.0**8, "up_proj": 2.0**8, "mlp.down_proj": 2.0**-14, "embed_tokens": 2.0**17}
    headroom = examined(planted(tmp_path / "m", changes=changes))
    assert headroom.verdict.code == HeadroomCode.DOES_NOT_FIT
    assert headroom.exit_code == ExitCode.GATE_FAILED
    assert headroom.advised is None
    assert "BF16" in headroom.verdict.advice[0]


def test_underflow_falls_as_the_loss_scale_grows(examination: Examination) -> None:
    headroom = examination(2.0**-8)
    assert headroom.gradients is not None
    shares = [scaled.activations_flushed for scaled in headroom.gradients.underflow]
    assert shares[0] > shares[8] > shares[16]
    assert all(earlier >= later for earlier, later in pairwise(shares))
    largest = [scaled.largest_scaled for scaled in headroom.gradients.underflow]
    assert largest[10] == pytest.approx(1024 * largest[0])
    assert headroom.verdict.code == HeadroomCode.FITS_WITH_LOSS_SCALE
    assert headroom.plain is not None
    assert headroom.plain.from_exponent is not None
    assert headroom.plain.from_exponent > 0


def test_gradients_of_true_fp16_overflow_where_fp32_says_they_must(examination: Examination) -> None:
    headroom = examination(1.0)
    assert headroom.gradients is not None
    assert headroom.plain is not None
    overflows = {scaled.exponent: scaled.overflows for scaled in headroom.gradients.underflow}
    for trial in headroom.plain.scales:
        if overflows[trial.exponent]:
            assert trial.relative_error is None, trial


@pytest.mark.parametrize("shrunk", [1.0, 2.0**-8])
def test_half_of_the_backward_passes_find_the_scales_that_all_of_them_find(
    examination: Examination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shrunk: float
) -> None:
    few = examination(shrunk).plain
    monkeypatch.setattr(
        passes, "try_scales", lambda *models, tell: passes.try_backward(*models, passes.EXPONENTS, tell)
    )
    every = examined(with_other_head(tmp_path, shrunk)).plain
    assert few is not None
    assert every is not None
    assert (few.from_exponent, few.to_exponent) == (every.from_exponent, every.to_exponent)
    assert len(few.scales) <= 13
    errors = {scale.exponent: scale.relative_error for scale in every.scales}
    assert all(errors.get(scale.exponent) == pytest.approx(scale.relative_error) for scale in few.scales)


def test_a_model_that_is_not_finite_in_fp32_is_said_to_be_broken(tmp_path: Path) -> None:
    folder = planted(tmp_path / "m", changes={"layers.0.mlp.up_proj": 1e30, "layers.0.mlp.gate_proj": 1e30})
    with pytest.raises(BrokenRecord, match="not finite even in FP32"):
        examined(folder)


def test_stand_in_rewards_are_said_to_be(examination: Examination) -> None:
    headroom = examination(1.0)
    assert headroom.gradients is not None
    assert headroom.gradients.stand_in_rewards
    assert headroom.gradients.norm > 0


def test_the_demo_checkpoint_fits_with_its_own_rewards() -> None:
    headroom = examined("demo", prompts=HeadroomPrompts(num_prompts=2), sampling=HeadroomSampling(max_new_tokens=64))
    assert headroom.verdict.code in FITS
    assert headroom.gradients is not None
    assert not headroom.gradients.stand_in_rewards
    assert headroom.plain is not None
    assert headroom.plain.from_exponent is not None
    assert headroom.plain.from_exponent <= 8
    assert headroom.plain.to_exponent is not None
    assert headroom.plain.to_exponent >= 16
