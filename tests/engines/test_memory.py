from types import SimpleNamespace

import pytest

from mismatch_probe.engines.vllm.declared import kv_cache_bytes, memory_defaults, replay_tokens

SMALL = SimpleNamespace(
    vocab_size=320, num_attention_heads=2, num_key_value_heads=1, head_dim=32, hidden_size=64, num_hidden_layers=2
)
LARGE_VOCABULARY = SimpleNamespace(**{**vars(SMALL), "vocab_size": 152_000})


@pytest.fixture(autouse=True)
def _no_setting_of_the_user(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def defaults(config, args=None, *, on_cpu=True, max_model_len=512, num_sequences=None):
    return memory_defaults(
        config, args or {}, dtype_bytes=2, max_model_len=max_model_len, num_sequences=num_sequences, on_cpu=on_cpu
    )


def test_the_cache_holds_keys_and_values_of_every_sequence_in_whole_blocks():
    per_token = 2 * 2 * 1 * 32 * 4
    assert kv_cache_bytes(SMALL, 4, max_model_len=200, num_sequences=3) == per_token * 128 * (3 * 2 + 1)


def test_a_config_without_kv_heads_and_head_dim_counts_all_heads():
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, num_hidden_layers=1)
    assert kv_cache_bytes(plain, 2, max_model_len=128, num_sequences=1) == 2 * 4 * 16 * 2 * 256


def test_a_recurrent_layer_has_room_for_a_state_of_each_sequence():
    state = SimpleNamespace(**vars(SMALL), mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
    attention_alone = kv_cache_bytes(SMALL, 2, max_model_len=64, num_sequences=3)
    assert kv_cache_bytes(state, 2, max_model_len=64, num_sequences=3) > attention_alone + 2 * 3 * 4 * 8 * 16 * 16


def test_the_cache_of_a_huge_model_stays_within_the_free_memory():
    huge = SimpleNamespace(**{**vars(SMALL), "num_hidden_layers": 10_000, "num_key_value_heads": 128, "head_dim": 256})
    import psutil

    assert defaults(huge, max_model_len=100_000)["kv_cache_memory_bytes"] < psutil.virtual_memory().total / 2


@pytest.mark.parametrize(
    ("num_sequences", "args", "held"), [(24, {}, 24), (1000, {}, 256), (24, {"max_num_seqs": 8}, 8)]
)
def test_the_cache_holds_the_sequences_that_run_at_once_and_no_more(num_sequences, args, held):
    size = defaults(SMALL, args, max_model_len=100, num_sequences=num_sequences)["kv_cache_memory_bytes"]
    assert size == kv_cache_bytes(SMALL, 2, max_model_len=100, num_sequences=held)


def test_the_cache_is_left_to_vllm_on_a_gpu():
    assert "kv_cache_memory_bytes" not in defaults(SMALL, on_cpu=False)


@pytest.mark.parametrize("name", ["kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"])
def test_a_cache_size_of_the_user_is_never_overridden(name):
    assert "kv_cache_memory_bytes" not in defaults(SMALL, {name: 1})


def test_a_cache_size_in_the_environment_is_never_overridden(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "kv_cache_memory_bytes" not in defaults(SMALL)


def test_a_model_without_attention_heads_gets_a_share_of_the_free_memory():
    assert defaults(SimpleNamespace(vocab_size=320))["kv_cache_memory_bytes"] > 0


def test_replayed_positions_of_a_large_vocabulary_are_bounded_to_a_gibibyte():
    tokens = replay_tokens(152_000)
    assert 256 <= tokens < 1024
    assert tokens * 152_000 * 12 <= 2**30


def test_a_small_vocabulary_leaves_the_step_size_to_vllm():
    assert "max_num_batched_tokens" not in defaults(SMALL)


def test_a_large_vocabulary_bounds_the_step_size():
    assert defaults(LARGE_VOCABULARY)["max_num_batched_tokens"] == replay_tokens(152_000)


def test_a_step_size_of_the_user_is_never_overridden():
    assert "max_num_batched_tokens" not in defaults(LARGE_VOCABULARY, {"max_num_batched_tokens": 8192})


def test_a_step_holds_a_token_of_every_sequence():
    assert defaults(LARGE_VOCABULARY, {"max_num_seqs": 1024})["max_num_batched_tokens"] == 1024


def test_without_chunked_prefill_a_step_holds_a_whole_prompt():
    bounded = defaults(LARGE_VOCABULARY, {"enable_chunked_prefill": False}, max_model_len=2048)
    assert bounded["max_num_batched_tokens"] == 2048
