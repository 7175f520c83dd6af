"""What each precision mode and override does to the numbers, and what the scorer reads back about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer
from tests.tiny_models import make_checkpoint
from tests.training_path.flat import flat, mean_error

pytestmark = pytest.mark.slow

Score = Callable[..., list[ScoredSequence]]


def settings(**changes: Any) -> TrainingPathSettings:
    return TrainingPathSettings(**changes)


@pytest.fixture(scope="module")
def reference(score: Score) -> list[ScoredSequence]:
    return score("llama", Dtype.FP64, reference=True)


@pytest.mark.parametrize("precision", ["weights", "to", "autocast", "fsdp"])
@pytest.mark.parametrize(("dtype", "smallest", "largest"), [(Dtype.FP16, 5e-4, 1e-2), (Dtype.BF16, 5e-3, 1e-1)])
def test_every_mode_computes_in_the_format_asked_for(
    precision: str, dtype: Dtype, smallest: float, largest: float, score: Score, reference: list[ScoredSequence]
) -> None:
    assert smallest < mean_error(score("llama", dtype, settings(precision=precision)), reference) < largest


def test_fsdp_computes_what_cast_weights_compute(score: Score) -> None:
    for dtype in (Dtype.FP16, Dtype.BF16, Dtype.FP32):
        sharded, cast = score("qwen3", dtype, settings(precision="fsdp")), score("qwen3", dtype)
        assert mean_error(sharded, cast) < 1e-6


@pytest.mark.parametrize("precision", ["weights", "to", "autocast", "fsdp"])
def test_fp32_is_fp32_in_every_mode(precision: str, score: Score, reference: list[ScoredSequence]) -> None:
    assert mean_error(score("llama", Dtype.FP32, settings(precision=precision)), reference) < 1e-5


def test_casting_the_model_rounds_its_rotary_frequencies_and_loading_in_the_format_does_not(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    frequencies = {}
    for precision in ("weights", "to", "autocast", "fsdp"):
        with Scorer.load(folder, Dtype.FP16, settings(precision=precision)) as scorer:
            frequencies[precision] = scorer.effective_settings()["rope_inv_freq_dtype"]
    assert frequencies == {"weights": "fp32", "to": "fp16", "autocast": "fp32", "fsdp": "fp32"}


def test_errors_of_the_cast_trap_grow_with_position(checkpoint: Callable[[str], Path]) -> None:
    random = np.random.default_rng(1)
    long = [TokenSequence(str(row), [1], random.integers(0, 256, 1500).tolist()) for row in range(2)]

    def errors(**arguments: Any) -> np.ndarray:
        with Scorer.load(checkpoint("llama"), **arguments) as scorer:
            return np.stack([scores.logprobs for scores in scorer.score_batch(long)])

    exact = errors(dtype=Dtype.FP32, settings=settings(), reference=True)
    weights = np.abs(errors(dtype=Dtype.FP16, settings=settings()) - exact)
    everything = np.abs(errors(dtype=Dtype.FP16, settings=settings(precision="to")) - exact)
    assert everything.mean() > 1.3 * weights.mean()
    assert everything[:, 1000:].mean() > 1.3 * everything[:, :100].mean()
    assert weights[:, 1000:].mean() < 1.3 * weights[:, :100].mean()


@pytest.mark.parametrize("precision", ["weights", "fsdp"])
def test_a_head_in_fp32_multiplies_the_bodys_hidden_states_in_fp32(
    precision: str, score: Score, checkpoint: Callable[[str], Path], sequences: list[TokenSequence]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16).eval()
    expected = []
    for sequence in sequences:
        ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, :-1].float()
            log_softmax = (hidden @ model.lm_head.weight.float().T).log_softmax(-1)
        expected.append(log_softmax.gather(1, ids[0, 1:, None])[-len(sequence.token_ids) :, 0])
    scores = flat(score("llama", Dtype.BF16, settings(precision=precision, lm_head_dtype=Dtype.FP32)))
    assert np.median(np.abs(scores - torch.cat(expected).numpy())) < 2e-6
    assert np.median(np.abs(flat(score("llama", Dtype.BF16)) - scores)) > 1e-4


def test_a_head_in_fp32_stays_out_of_autocast(checkpoint: Callable[[str], Path]) -> None:
    with Scorer.load(
        checkpoint("llama"), Dtype.BF16, settings(precision="autocast", lm_head_dtype=Dtype.FP32)
    ) as scorer:
        effective = scorer.effective_settings()
    assert (effective["dtype"], effective["lm_head_dtype"]) == ("bf16", "fp32")


def test_a_tied_head_in_fp32_leaves_the_embedding_as_it_is(checkpoint: Callable[[str], Path]) -> None:
    with Scorer.load(checkpoint("qwen3"), Dtype.BF16, settings(lm_head_dtype=Dtype.FP32)) as scorer:
        effective = scorer.effective_settings()
    assert effective["lm_head_dtype"] == "fp32"
    assert effective["dtype"] == "bf16"
    assert set(effective["parameter_dtypes"]) == {"bf16", "fp32"}


def test_a_log_softmax_in_bf16_is_further_off(score: Score, reference: list[ScoredSequence]) -> None:
    usual = mean_error(score("llama", Dtype.FP16), reference)
    assert mean_error(score("llama", Dtype.FP16, settings(log_softmax_dtype=Dtype.BF16)), reference) > 2 * usual


def test_eager_and_sdpa_agree_in_fp32(score: Score) -> None:
    assert mean_error(score("llama", Dtype.FP32, settings(attention="eager")), score("llama", Dtype.FP32)) < 1e-5


def test_sdpa_drops_gemma2s_attention_soft_cap_and_the_reference_shows_it(score: Score) -> None:
    exact = score("gemma2", Dtype.FP32, reference=True)
    assert mean_error(score("gemma2", Dtype.FP32, settings(attention="eager")), exact) < 1e-5
    assert mean_error(score("gemma2", Dtype.FP32, settings(attention="sdpa")), exact) > 1e-3


def test_unset_attention_is_one_that_computes_the_architecture(checkpoint: Callable[[str], Path], score: Score) -> None:
    assert mean_error(score("gemma2", Dtype.FP32), score("gemma2", Dtype.FP32, reference=True)) < 1e-5
    for family, running, left_out in (("gemma2", "eager", "attn_logit_softcapping = 50"), ("llama", "sdpa", None)):
        with Scorer.load(checkpoint(family), Dtype.FP32, settings()) as scorer:
            effective = scorer.effective_settings()
        assert effective["attention"] == running
        assert (effective["sdpa_leaves_out"] is None) == (left_out is None)
        assert left_out is None or left_out in effective["sdpa_leaves_out"]


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_experts_that_autocast_does_not_reach_are_told_apart(checkpoint: Callable[[str], Path], dtype: Dtype) -> None:
    with Scorer.load(checkpoint("qwen3-moe"), dtype, settings(precision="autocast")) as scorer:
        effective = scorer.effective_settings()
    assert (effective["dtype"], effective["experts_dtype"]) == (dtype, "fp32")
    assert effective["multiplications_by_dtype"]["fp32"] > effective["multiplications_by_dtype"][dtype]


@pytest.mark.parametrize("precision", ["weights", "to", "fsdp"])
def test_experts_follow_the_dtype_where_weights_do(checkpoint: Callable[[str], Path], precision: str) -> None:
    with Scorer.load(checkpoint("qwen3-moe"), Dtype.BF16, settings(precision=precision)) as scorer:
        effective = scorer.effective_settings()
    assert (effective["dtype"], effective["experts_dtype"]) == ("bf16", "bf16")


def test_a_model_without_experts_has_no_format_of_them(checkpoint: Callable[[str], Path]) -> None:
    with Scorer.load(checkpoint("llama"), Dtype.BF16, settings()) as scorer:
        assert scorer.effective_settings()["experts_dtype"] is None


def test_what_runs_is_read_back(checkpoint: Callable[[str], Path]) -> None:
    with Scorer.load(checkpoint("llama"), Dtype.FP16, settings(precision="autocast"), temperature=0.5) as scorer:
        effective = scorer.effective_settings()
    assert effective["dtype"] == "fp16"
    assert effective["parameter_dtypes"] == {"fp32": effective["num_parameters"]}
    assert effective["autocast_dtype"] == "fp16"
    assert effective["architecture"] == "LlamaForCausalLM"
    assert effective["attention"] == "sdpa"
    assert effective["dropout"] == "off"
    assert effective["temperature"] == 0.5
    assert effective["fp16_products"] == "accumulated in fp32 and rounded once"
    assert effective["weight_cast"]["dtype"] == "fp16"
    assert effective["torch"] == torch.__version__


def test_a_scorer_leaves_no_arithmetic_behind(checkpoint: Callable[[str], Path], score: Score) -> None:
    a = torch.randn(64, 64)
    before = (a @ a, a.half() @ a.half(), (a.double() @ a.double()).float().dtype)
    for arguments in ({"dtype": Dtype.FP64, "reference": True}, {"dtype": Dtype.FP16}):
        score("llama", **arguments)
    assert torch.equal(before[0], a @ a)
    assert torch.equal(before[1], a.half() @ a.half())
    assert a.double().float().dtype == before[2] == torch.float32
    assert flat(score("llama", Dtype.FP32)).dtype == np.float32
