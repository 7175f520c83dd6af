import json
from dataclasses import fields

import pytest

from mismatch_probe.engines.vllm.arguments import default_arguments, engine_arguments, known_arguments
from mismatch_probe.errors import UsageError

KNOWN = {
    "max_num_seqs": "int | None",
    "max_num_batched_tokens": "int | None",
    "gpu_memory_utilization": "float",
    "enforce_eager": "bool",
    "enable_chunked_prefill": "bool | None",
    "tokenizer": "str | None",
    "served_model_name": "str | list[str] | None",
    "hf_overrides": "HfOverrides",
    "speculative_config": "dict[str, Any] | None",
    "cudagraph_capture_sizes": "list[int] | None",
    "per_request_spec_decode_metrics": "Literal['none', 'summary', 'detailed']",
    "optimization_level": "OptimizationLevel",
    "kv_cache_dtype": "CacheDType",
    "dtype": "ModelDType",
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_num_seqs", "8", 8),
        ("max_num_seqs", "None", None),
        ("max_num_seqs", "null", None),
        ("gpu_memory_utilization", "0.90", 0.9),
        ("gpu_memory_utilization", "1", 1.0),
        ("enforce_eager", "False", False),
        ("enable_chunked_prefill", "true", True),
        ("tokenizer", "1e5", "1e5"),
        ("tokenizer", "true", "true"),
        ("served_model_name", "7", "7"),
        ("served_model_name", '["7", "8"]', ["7", "8"]),
        ("hf_overrides", '{"head_dtype": "float32"}', {"head_dtype": "float32"}),
        ("hf_overrides", "{broken", "{broken"),
        ("speculative_config", '{"method": "ngram"}', {"method": "ngram"}),
        ("cudagraph_capture_sizes", "[1, 2]", [1, 2]),
        ("per_request_spec_decode_metrics", "none", "none"),
        ("kv_cache_dtype", "fp8", "fp8"),
        ("optimization_level", "2", 2),
    ],
)
def test_text_becomes_the_value_that_vllm_declares_the_argument_to_be(name, text, value):
    typed = engine_arguments({name: text}, KNOWN)[name]
    assert (typed, type(typed)) == (value, type(value))
    assert engine_arguments({name: typed}, KNOWN) == {name: typed}


def test_a_whole_number_from_a_file_is_the_float_that_a_flag_gives():
    from_file, by_flag = (engine_arguments({"gpu_memory_utilization": given}, KNOWN) for given in (1, "1.0"))
    assert json.dumps(from_file) == json.dumps(by_flag)


def test_a_text_argument_that_looks_like_a_number_stays_text():
    assert engine_arguments({"tokenizer": "007"}, KNOWN) == {"tokenizer": "007"}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("max_num_seqs", "many", "a whole number"),
        ("max_num_seqs", "1.5", "a whole number"),
        ("max_num_seqs", "true", "a whole number"),
        ("gpu_memory_utilization", "none", "a number"),
        ("enforce_eager", "1", "true or false"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type_it_should_have(name, value, kind):
    with pytest.raises(UsageError, match=rf"--vllm\.{name} takes {kind}, not '{value}'"):
        engine_arguments({name: value}, KNOWN)


def test_an_optional_argument_may_be_none_and_a_float_whole():
    assert engine_arguments({"max_num_seqs": "none", "gpu_memory_utilization": "1"}, KNOWN) == {
        "max_num_seqs": None,
        "gpu_memory_utilization": 1,
    }


def test_dashes_and_prefixes_are_spellings_of_the_same_argument():
    assert engine_arguments({"max-num-seqs": "4"}, KNOWN) == {"max_num_seqs": 4}
    assert engine_arguments({"--vllm.max_num_seqs": 4}, KNOWN) == {"max_num_seqs": 4}


def test_an_argument_given_in_two_spellings_is_refused():
    with pytest.raises(UsageError, match=r"--vllm\.max_num_seqs is given twice"):
        engine_arguments({"max-num-seqs": 4, "max_num_seqs": 5}, KNOWN)


def test_an_unknown_argument_is_named_with_close_matches():
    with pytest.raises(UsageError, match=r"'max_num_seq'.*did you mean --vllm\.max_num_seqs"):
        engine_arguments({"max_num_seq": 4}, KNOWN)


def test_an_unknown_argument_unlike_any_other_is_named_without_a_guess():
    with pytest.raises(UsageError, match=r"no argument 'zzz'$"):
        engine_arguments({"zzz": 1}, KNOWN)


@pytest.mark.parametrize(
    "name", ["dtype", "logprobs_mode", "seed", "generation_config", "enable_prefix_caching", "hf_token"]
)
def test_what_the_probe_decides_cannot_be_passed_through(name):
    with pytest.raises(UsageError, match=rf"--vllm\.{name} cannot be given"):
        engine_arguments({name: "auto"}, KNOWN)


def test_the_installed_vllm_knows_every_argument_the_probe_uses():
    used = {
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "enable_chunked_prefill",
        "tensor_parallel_size",
        "worker_extension_cls",
        "attention_backend",
    }
    known = known_arguments()
    assert used <= known.keys()
    assert known["enforce_eager"] == "bool"
    assert known["max_num_seqs"] == "int | None"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_arguments_read_from_the_source_are_those_that_vllm_has():
    from vllm import EngineArgs

    declared = {field.name: field.default for field in fields(EngineArgs)}
    assert set(known_arguments()) == set(declared)
    defaults = default_arguments()
    assert {name: declared[name] for name in defaults} == defaults
    assert (defaults["tensor_parallel_size"], defaults["kv_cache_dtype"]) == (1, "auto")
    assert "enforce_eager" not in defaults, "the probe chooses it where it is left out"
