"""Settings that change what an engine computes, each on real vLLM."""

import gc
import weakref
from importlib import import_module

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.vllm.arguments import register_kernels
from mismatch_probe.engines.vllm.effective import check_applied
from mismatch_probe.engines.vllm.launch import frozen_heap
from mismatch_probe.errors import EngineError, OutOfMemory, UsageError
from tests.engines.conftest import CONTEXT, gaps, requests, same
from tests.tiny_models import FAMILIES, make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LONG = SamplingSettings(max_new_tokens=100)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def plain(start, checkpoint):
    """Samples of an FP32 engine at temperature 1."""
    return start(checkpoint).sample(requests(), LONG)


def decode_and_prefill(engine, sampling):
    sampled = engine.sample(requests(), sampling)
    return [one.scores for one in sampled], engine.replay([one.sequence for one in sampled])


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_and_prefill_agree_in_fp32_at_a_temperature_in_every_family(start, tmp_path, family):
    sampling = {"temperature": 0.7, "max_new_tokens": 48}
    engine = start(make_checkpoint(tmp_path, family), **sampling)
    decoded, replayed = decode_and_prefill(engine, SamplingSettings(**sampling))
    assert np.abs(gaps(decoded, replayed)).max() < 1e-5


def test_a_replay_at_another_temperature_is_seen(plain, start, checkpoint):
    replayed = start(checkpoint, temperature=0.7).replay([one.sequence for one in plain])
    assert np.abs(gaps([one.scores for one in plain], replayed)).mean() > 0.1


def test_top_p_is_renormalised_in_decode_alone_and_the_settings_say_so(start, checkpoint):
    engine = start(checkpoint, top_p=0.8)
    kept = gaps(*decode_and_prefill(engine, SamplingSettings(top_p=0.8, max_new_tokens=32)))
    assert kept.min() > -1e-5
    assert kept.mean() > 0.05
    assert kept.max() < -np.log(0.8) + 1e-5
    assert engine.effective_settings()["decode_support"] == "kept by top_p and top_k, renormalised"
    assert engine.effective_settings()["replay_support"] == "full vocabulary"


def test_a_dtype_is_applied_and_shows_in_the_log_probs(start, checkpoint):
    sampling = SamplingSettings(max_new_tokens=32)
    sampled = {dtype: start(checkpoint, dtype).sample(requests(), sampling) for dtype in (Dtype.FP16, Dtype.BF16)}
    exact = start(checkpoint, Dtype.FP32)
    error = {
        dtype: np.abs(gaps([one.scores for one in ours], exact.replay([one.sequence for one in ours]))).mean()
        for dtype, ours in sampled.items()
    }
    assert 1e-4 < error["fp16"] < error["bf16"] / 3
    assert error["bf16"] < 0.5


def test_the_dtype_read_back_is_the_one_that_runs(start, checkpoint):
    settings = start(checkpoint, Dtype.BF16).effective_settings()
    assert settings["dtype"] == "bf16"
    assert settings["kv_cache_dtypes"] == ["bfloat16"]
    check_applied(settings, Dtype.BF16)
    with pytest.raises(EngineError, match="runs in bf16 although fp16"):
        check_applied(settings, Dtype.FP16)
    with pytest.raises(EngineError, match="holds its weights in float32"):
        check_applied({**settings, "parameter_dtypes": {"float32": 3, "bfloat16": 1}}, Dtype.BF16)
    with pytest.raises(EngineError, match="raw_logprobs"):
        check_applied({**settings, "logprobs_mode": "raw_logprobs"}, Dtype.BF16)


def test_prefix_caching_keeps_a_batch_independent_of_earlier_ones(start, checkpoint):
    engine = start(checkpoint, prefix_caching=True, args={"block_size": 32})
    sampling = SamplingSettings(max_new_tokens=90, ignore_eos=True)
    first = engine.sample(requests(), sampling)
    assert engine.effective_settings()["prefix_caching"] is True
    assert same(engine.sample(requests(), sampling), first)
    replayed = engine.replay([one.sequence for one in first])
    assert np.abs(gaps([one.scores for one in first], replayed)).max() < 1e-5


def test_prefill_in_small_chunks_changes_neither_samples_nor_log_probs(plain, start, checkpoint):
    chunked = start(checkpoint, args={"max_num_batched_tokens": 32})
    assert chunked.effective_settings()["max_num_batched_tokens"] == 32
    sampled = chunked.sample(requests(), LONG)
    assert [one.sequence for one in sampled] == [one.sequence for one in plain]
    replayed = chunked.replay([one.sequence for one in sampled])
    assert np.abs(gaps([one.scores for one in sampled], replayed)).max() < 1e-5


def test_every_end_of_sequence_id_of_the_generation_config_ends_a_response(start, tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    ends = [258, *range(0, 256, 2)]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}, "temperature": 0.1, "do_sample": true}}')
    engine = start(folder)
    sampled = engine.sample(requests(), SamplingSettings(max_new_tokens=64))
    assert {one.finish_reason for one in sampled} == {"stop"}
    assert all(one.sequence.token_ids[-1] in ends for one in sampled)
    assert engine.effective_settings()["end_of_sequence_ids"] == sorted(ends)
    endless = engine.sample(requests(), SamplingSettings(max_new_tokens=64, ignore_eos=True))
    assert {one.finish_reason for one in endless} == {"length"}


def test_sampling_defaults_of_the_checkpoint_are_not_picked_up(plain, start, tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": 258, "temperature": 0.1, "top_k": 2}')
    assert same(start(folder).sample(requests(), LONG), plain)


def test_a_cache_too_small_is_out_of_memory_with_the_flags(start, checkpoint):
    with pytest.raises(OutOfMemory, match=r"--vllm\.max_model_len.*VLLM_CPU_KVCACHE_SPACE"):
        start(checkpoint, args={"kv_cache_memory_bytes": 1024})


def test_a_context_beyond_the_checkpoint_names_the_flags(start, tmp_path):
    with pytest.raises(UsageError, match=r"context of .* is too short.*--max-new-tokens"):
        start(make_checkpoint(tmp_path, "llama", max_position_embeddings=CONTEXT // 2))


def test_broken_safetensors_name_the_checkpoint(start, tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UsageError, match="broken safetensors"):
        start(folder)


def test_an_unsupported_architecture_is_named(start, tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "NobodysForCausalLM"))
    with pytest.raises(EngineError, match="architecture NobodysForCausalLM"):
        start(folder)


def test_a_missing_checkpoint_names_the_flag(start, tmp_path):
    with pytest.raises(UsageError, match="--model"):
        start(tmp_path / "nothing-here")


def test_a_value_vllm_refuses_names_its_argument(start, checkpoint):
    with pytest.raises(UsageError, match=r"--vllm\.kv_cache_dtype|--vllm\.cache_dtype"):
        start(checkpoint, args={"kv_cache_dtype": "fp7"})


def test_an_unknown_argument_is_named(start, checkpoint):
    with pytest.raises(UsageError, match=r"--vllm\.enforce_eager"):
        start(checkpoint, args={"enforce_eagr": True})


def test_a_dtype_vllm_lacks_is_named(start, checkpoint):
    with pytest.raises(UsageError, match=Dtype.FP64):
        start(checkpoint, Dtype.FP64)


def test_a_temperature_vllm_would_change_is_refused(start, checkpoint):
    with pytest.raises(UsageError, match="silently sample at"):
        start(checkpoint, temperature=0.001)


@pytest.mark.parametrize("froze_before", [True, False])
def test_an_engine_that_ends_is_collected_and_what_the_process_froze_stays_frozen(
    start, checkpoint, froze_before, monkeypatch
):
    """vLLM alone would thaw all that imports made, and look at each of its objects four times.

    Its collections at the start show nothing here.
    """
    if not froze_before:
        gc.unfreeze()
    try:
        frozen = gc.get_freeze_count()
        with monkeypatch.context() as at_the_start:
            at_the_start.setattr(gc, "collect", lambda *_: 0)
            engine = start(checkpoint)
        [model] = engine.llm.apply_model(weakref.ref)
        engine.close()
        assert model() is None
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)
    finally:
        gc.freeze()


def test_an_engine_that_froze_itself_is_thawed_by_vllm_as_it_ends():
    gc.unfreeze()
    try:
        keep_frozen = frozen_heap()
        gc.freeze()
        with keep_frozen():
            gc.unfreeze()
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_kernels_of_the_processor_are_put_in_place_once(monkeypatch):
    platform = import_module("vllm.platforms").current_platform
    blocks = import_module("vllm.v1.worker.block_table").ComputeSlotMappingKernel
    name = "register_triton_kernel_overrides"
    monkeypatch.setattr(type(platform), name, vars(type(platform))[name])
    register_kernels()
    kernel = blocks.kernel
    assert type(kernel).__name__ == "KernelOverride"
    platform.register_triton_kernel_overrides()
    assert blocks.kernel is kernel
