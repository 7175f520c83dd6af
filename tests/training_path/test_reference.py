from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer, observation
from mismatch_probe.training_path.arithmetic import product_flags, true_fp32
from mismatch_probe.training_path.attention import EAGER_IN_BLOCKS
from mismatch_probe.verdict.preflight.facts import AGREEMENT, contradiction
from tests.tiny_models import FAMILIES, make_checkpoint, quantise_blocks
from tests.training_path.flat import flat, mean_error

Score = Callable[..., list[ScoredSequence]]
Checkpoint = Callable[[str], Path]
Agreement = Callable[[str], dict[str, Any]]
DEFAULTS = TrainingPathSettings()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fp32_reference_is_within_fp32_noise_of_the_fp64_reference(family: str, score: Score) -> None:
    exact = score(family, Dtype.FP64, reference=True)
    assert flat(exact).dtype == np.float64
    assert 0 < mean_error(score(family, Dtype.FP32, reference=True), exact) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_in_blocks_is_the_models_own_eager_attention(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    sequence = TokenSequence("long", [1], random.integers(0, 256, 200).tolist())
    monkeypatch.setitem(_blocks(), "cpu", 1)
    with Scorer.load(checkpoint(family), Dtype.FP32, DEFAULTS, reference=True) as scorer:
        scorer._model.set_attn_implementation(EAGER_IN_BLOCKS)
        (scores,) = scorer.score_batch([sequence])
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager").eval()
    ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
    with torch.no_grad():
        log_softmax = model(ids).logits[0, :-1].log_softmax(-1)
    eager = log_softmax.gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(scores.logprobs, eager, atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_in_the_fp64_reference_is_rounded_below_fp64(family: str, checkpoint: Checkpoint) -> None:
    class Formats(TorchDispatchMode):
        seen: set[torch.dtype] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() > 64:
                self.seen.add(result.dtype)
            return result

    sequence = TokenSequence("a", [1, 2, 3], list(range(70)))
    with Scorer.load(checkpoint(family), Dtype.FP64, DEFAULTS, reference=True) as scorer, Formats() as formats:
        scorer.score_batch([sequence])
        buffers = {name: buffer.dtype for name, buffer in scorer._model.named_buffers() if buffer.is_floating_point()}
    assert formats.seen == {torch.float64}
    coarser = [name for name, dtype in buffers.items() if dtype != torch.float64]
    assert all(name.endswith("inv_freq") for name in coarser), "`benchmarks.rope_frequencies` says what these matter"


@pytest.mark.slow
def test_the_weights_of_a_quantised_checkpoint_are_the_same_in_fp64(
    tmp_path: Path, sequences: list[TokenSequence]
) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = quantise_blocks(make_checkpoint(tmp_path / "fp8", "llama", **shape))
    in_fp32, in_fp64 = (scored(folder, dtype, sequences) for dtype in (Dtype.FP32, Dtype.FP64))
    assert 0 < mean_error(in_fp32, in_fp64) < 1e-5


def scored(folder: Path, dtype: Dtype, sequences: list[TokenSequence]) -> list[ScoredSequence]:
    with Scorer.load(folder, dtype, DEFAULTS, reference=True) as scorer:
        return scorer.score_batch(sequences)


@pytest.mark.slow
def test_the_reference_on_rounded_weights_computes_with_the_weights_pi_holds(
    tmp_path: Path, checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    folder = _with_full_fp32_weights(checkpoint("llama"), tmp_path)
    rounded = _with_weights(folder, tmp_path / "rounded", lambda weight: weight.bfloat16().float())

    def scores(path: Path, **arguments: Any) -> np.ndarray:
        with Scorer.load(path, Dtype.FP32, DEFAULTS, reference=True, **arguments) as scorer:
            return flat(scorer.score_batch(sequences))

    np.testing.assert_array_equal(scores(folder, rounded_to=Dtype.BF16), scores(rounded))
    assert np.abs(scores(folder, rounded_to=Dtype.BF16) - scores(folder)).mean() > 1e-3


@pytest.mark.slow
def test_rounding_that_changes_nothing_is_known_to_be_exact(tmp_path: Path, checkpoint: Checkpoint) -> None:
    exact = checkpoint("llama")
    with Scorer.load(exact, Dtype.FP32, DEFAULTS, reference=True, rounded_to=Dtype.BF16) as scorer:
        assert scorer.weight_cast.is_exact
    with Scorer.load(
        _with_full_fp32_weights(exact, tmp_path), Dtype.FP32, DEFAULTS, reference=True, rounded_to=Dtype.BF16
    ) as scorer:
        assert not scorer.weight_cast.is_exact
        assert scorer.effective_settings()["weight_cast"]["changed_share"] > 0.9


def test_a_reference_in_16_bit_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="a reference in fp16 would carry the error it is to measure"):
        Scorer.load(checkpoint("llama"), Dtype.FP16, DEFAULTS, reference=True)


def test_rounded_weights_are_for_the_reference_alone(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="pi's weights follow its own dtype"):
        Scorer.load(checkpoint("llama"), Dtype.FP32, DEFAULTS, rounded_to=Dtype.FP16)


def test_true_fp32_sets_every_flag_and_puts_it_back() -> None:
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = (gpu.fp32_precision, cpu.fp32_precision, gpu.allow_bf16_reduced_precision_reduction)
    gpu.fp32_precision, cpu.fp32_precision = "tf32", "bf16"
    try:
        with true_fp32():
            assert gpu.fp32_precision == cpu.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "ieee"
            assert not gpu.allow_bf16_reduced_precision_reduction
            assert not gpu.allow_fp16_reduced_precision_reduction
        assert (gpu.fp32_precision, cpu.fp32_precision) == ("tf32", "bf16")
    finally:
        gpu.fp32_precision, cpu.fp32_precision = before[:2]
    assert gpu.allow_bf16_reduced_precision_reduction == before[2]


def test_flags_of_another_device_are_not_reported() -> None:
    """TF32 of a GPU moves nothing that a CPU computes."""
    gpu = torch.backends.cuda.matmul
    before, gpu.fp32_precision = gpu.fp32_precision, "tf32"
    try:
        assert "tf32" in product_flags("cuda").values()
        assert "tf32" not in product_flags("cpu").values()
    finally:
        gpu.fp32_precision = before


@pytest.mark.slow
def test_a_reference_runs_with_those_flags_and_reads_them_back(checkpoint: Checkpoint) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with Scorer.load(checkpoint("llama"), Dtype.FP32, DEFAULTS, reference=True) as reference:
            assert reference.effective_settings()["fp32_products_mkldnn.matmul"] == "ieee"
        with Scorer.load(checkpoint("llama"), Dtype.FP32, DEFAULTS) as pi:
            assert pi.effective_settings()["fp32_products_mkldnn.matmul"] == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def _blocks() -> dict[str, int]:
    from mismatch_probe.training_path import attention

    return attention._SCORES_PER_BLOCK


def _with_full_fp32_weights(folder: Path, target: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    return _with_weights(
        folder, target / "full", lambda weight: weight * (1 + 1e-3 * torch.rand(weight.shape, generator=generator))
    )


def _with_weights(folder: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = {name: change(weight) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def agreement(folder: Path, spoil: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, Any]:
    """How far the reference is from itself on two responses; `spoil` changes what its first layer gives."""
    random = np.random.default_rng(0)
    sequences = [TokenSequence(str(size), [1, 2], random.integers(0, 256, size).tolist()) for size in (90, 31)]
    with Scorer.load(folder, Dtype.FP32, DEFAULTS, reference=True) as scorer:
        if spoil is not None:
            layer = scorer._model.get_input_embeddings()
            layer.register_forward_hook(lambda _, inputs, output: spoil(output))
        measured = scorer.agreement_with_itself(sequences)
    assert measured is not None
    return measured


@pytest.fixture(scope="module")
def sound(checkpoint: Checkpoint) -> Agreement:
    """How far the reference of a family is from itself, measured once."""
    return cache(lambda family: agreement(checkpoint(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "qwen3.5", "falcon-h1"])
def test_a_sound_reference_agrees_with_itself(family: str, sound: Agreement) -> None:
    measured = sound(family)
    assert measured["num_tokens"] == 16
    assert max(measured["shorter_nats"], measured["cached_nats"]) < 1e-4
    assert measured["again_nats"] < 1e-6
    assert contradiction({AGREEMENT: measured}) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon-h1"])
def test_agreement_by_the_last_logits_is_that_by_all(
    family: str, sound: Agreement, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_last = sound(family)
    monkeypatch.setattr(observation, "_LAST_LOGITS", "no argument of a model")
    of_all = agreement(checkpoint(family))
    for name in ("again_nats", "shorter_nats", "cached_nats"):
        assert of_last[name] == pytest.approx(of_all[name], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.002, 0.5])
@pytest.mark.parametrize("family", ["llama", "falcon-h1"])
def test_a_cached_pass_that_is_off_is_seen(family: str, strength: float, checkpoint: Checkpoint) -> None:
    def spoil(hidden_BSD: torch.Tensor) -> torch.Tensor:
        return hidden_BSD * (1 + strength * torch.sign(hidden_BSD)) if hidden_BSD.shape[1] == 1 else hidden_BSD

    assert "behind a cache" in (contradiction({AGREEMENT: agreement(checkpoint(family), spoil)}) or "")


@pytest.mark.slow
def test_a_model_whose_dropout_is_active_does_not_repeat_its_own_pass(checkpoint: Checkpoint) -> None:
    measured = agreement(checkpoint("llama"), lambda hidden_BSD: torch.nn.functional.dropout(hidden_BSD, 0.01))
    assert measured["again_nats"] > 1e-3
    assert "in the same pass once more" in (contradiction({AGREEMENT: measured}) or "")


@pytest.mark.slow
def test_padding_that_reaches_the_tokens_before_it_is_seen(checkpoint: Checkpoint) -> None:
    def spoil(hidden_BSD: torch.Tensor) -> torch.Tensor:
        return hidden_BSD * (1 + 0.02 * (hidden_BSD.shape[1] % 2) * torch.sign(hidden_BSD))

    measured = agreement(checkpoint("llama"), spoil)
    assert measured["shorter_nats"] > 1e-3
    assert contradiction({AGREEMENT: measured}) is not None


@pytest.mark.slow
def test_a_model_without_a_cache_is_not_accused(checkpoint: Checkpoint) -> None:
    def refuse(hidden_BSD: torch.Tensor) -> torch.Tensor:
        if hidden_BSD.shape[1] == 1:
            raise ValueError("no decoding here")
        return hidden_BSD

    measured = agreement(checkpoint("llama"), refuse)
    assert (measured["cached_nats"], measured["why_not_cached"]) == (None, "ValueError: no decoding here")
    assert contradiction({AGREEMENT: measured}) is None


@pytest.mark.slow
def test_a_recurrent_model_in_bf16_runs_in_bf16_though_its_states_are_in_fp32(checkpoint: Checkpoint) -> None:
    with Scorer.load(checkpoint("falcon-h1"), Dtype.BF16, DEFAULTS) as scorer:
        read_back = scorer.effective_settings()
    counts = read_back["multiplications_by_dtype"]
    assert counts["fp32"] > counts["bf16"]
    assert read_back["dtype"] == "bf16"
