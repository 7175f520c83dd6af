"""The lint of effective settings: silent on what two right sides report, one finding for each thing that differs."""

from typing import Any

import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import ModelIdentity
from mismatch_probe.verdict.preflight import preflight, preflight_of_run
from mismatch_probe.verdict.preflight.facts import Sides, forward_facts, has_experts

CONFIG = {
    "hidden_size": 64,
    "rope_parameters.rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "num_experts_per_tok": 2,
}
TRAIN = {
    "dtype": "bf16",
    "config": CONFIG,
    "temperature": 1.0,
    "rope_inv_freq_dtype": "fp32",
    "log_softmax_dtype": "fp32",
    "lm_head_dtype": "bf16",
    "dropout": "off",
    "fp32_products_cuda.matmul": "ieee",
}
INFER = {
    "dtype": "bf16",
    "config": CONFIG,
    "replay_temperature": 1.0,
    "decode_support": "full vocabulary",
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "kv_cache_dtypes": ["bfloat16"],
    "lm_head_dtype": "bfloat16",
    "prefix_caching": False,
    "speculative_config": None,
    "float32_matmul_precision": "highest",
}


ADAPTER = {
    "folder": "lora", "fingerprint": "a1", "rank": 8, "alpha": 16.0, "num_modules": 14, "change_norm": 2.0,
    "merged": False,
}  # fmt: skip


def sides(train: dict[str, Any] | None = None, infer: dict[str, Any] | None = None, **more: Any) -> Sides:
    return Sides(Dtype.BF16, Dtype.BF16, {**TRAIN, **(train or {})}, {**INFER, **(infer or {})}, **more)


def test_a_quantization_that_reaches_no_layer_is_told_from_one_that_does() -> None:
    plain = {"quantization": "experts_int8", "weight_methods": {"UnquantizedLinearMethod": 8}}
    [finding] = preflight(sides({}, plain))
    assert (finding.setting, finding.code) == ("quantization", None)
    assert "quantises no layer of this model" in finding.what
    quantised = {
        "quantization": "fp8_per_channel",
        "weight_methods": {"Fp8LinearMethod": 7, "UnquantizedLinearMethod": 1},
    }
    [finding] = preflight(sides({}, quantised))
    assert (finding.setting, finding.code) == ("quantization", Code.ONE_SIDED_DTYPE)


def quantized(**changes: Any) -> dict[str, Any]:
    facts = {"method": "fp8", "source": "checkpoint", "read_as": None, "stored": {"f8_e4m3": 9}, "expanded": False}
    return {"quantized": {**facts, **changes}}


AT_LOAD = quantized(source="at load", read_as="bf16", stored={"bf16": 9})


@pytest.mark.parametrize(
    ("infer", "words"),
    [
        (quantized(), "as the checkpoint stores them"),
        (AT_LOAD, "rounded by the engine at load from bf16"),
        (quantized(source="at load", read_as="bf16", stored={"fp32": 9}), "to which it rounds the stored fp32 first"),
    ],
)
def test_from_which_weights_the_engine_quantises_is_said(infer: dict[str, Any], words: str) -> None:
    [finding] = preflight(sides({}, {"quantization": "fp8", **infer}))
    assert finding.what.endswith(words)


def test_quantised_weights_of_one_source_are_told_from_those_of_two() -> None:
    expanded = quantized(expanded=True)
    same = preflight(sides(expanded, {"quantization": "fp8", **quantized()}))[-1]
    assert (same.level, same.setting) == ("note", "quantized")
    assert "expanded before anything is computed; the engine's are the same ones" in same.what
    other = preflight(sides(expanded, {"quantization": "fp8", **AT_LOAD}))[-1]
    assert (other.level, other.code) == ("warning", Code.ONE_SIDED_DTYPE)
    assert "are another source's: rounded by the engine at load from bf16" in other.what
    [alone] = preflight(sides(expanded))
    assert alone.what.endswith("the engine's are not")


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        (None, []),
        (("<bos>", 0, 6), []),
        (("<bos>", 1, 6), ["1 of 6 prompts does not begin with <bos>, as every text of this model's family does"]),
        (
            ("<b\x1b[2J", 6, 6),
            ["6 of 6 prompts do not begin with <b<U+001B>[2J, as every text of this model's family does"],
        ),
    ],
)
def test_prompts_without_the_familys_first_token_are_told(
    lacking: tuple[str, int, int] | None, words: list[str]
) -> None:
    found = preflight(sides(lacking_start=lacking))
    assert [finding.what for finding in found] == words
    assert all((finding.level, finding.code) == ("warning", Code.PROMPT_PREFIX) for finding in found)


def test_two_right_sides_have_nothing_to_say() -> None:
    assert preflight(sides()) == []


def test_an_adapter_on_one_side_is_a_note_where_the_other_loads_another_checkpoint() -> None:
    base = ModelIdentity(
        name="base",
        folder="base",
        fingerprint="a1",
        architecture="X",
        context_length=None,
        checkpoint_dtype=None,
        weight_bytes=0,
    )
    merged = base.model_copy(update={"name": "merged", "fingerprint": "b2"})
    held = {"adapter": ADAPTER}
    [finding] = [
        difference
        for difference in preflight(sides({}, held, checkpoints=(merged, base)))
        if difference.setting == "adapter"
    ]
    assert finding.level == "note"
    [finding] = preflight(sides({}, held, checkpoints=(base, base)))
    assert finding.level == "error"


@pytest.mark.parametrize("norm", [2.0, 2.02, None])
def test_the_same_adapter_applied_alike_has_nothing_to_say(norm: float | None) -> None:
    assert preflight(sides({"adapter": ADAPTER}, {"adapter": {**ADAPTER, "change_norm": norm}})) == []


def test_an_engine_that_says_little_is_not_accused() -> None:
    assert preflight(Sides(Dtype.BF16, Dtype.BF16, {"dtype": "bf16"}, {"dtype": "bf16"})) == []


@pytest.mark.parametrize(
    ("train", "infer", "level", "code"),
    [
        ({"dtype": "fp32"}, {}, "error", Code.DTYPE_NOT_APPLIED),
        ({"adapter": ADAPTER}, {}, "error", Code.ADAPTER),
        ({}, {"adapter": ADAPTER}, "error", Code.ADAPTER),
        ({"adapter": ADAPTER}, {"adapter": {**ADAPTER, "fingerprint": "b2"}}, "error", Code.ADAPTER),
        ({"adapter": ADAPTER}, {"adapter": {**ADAPTER, "change_norm": 4.0}}, "error", Code.ADAPTER),
        ({"adapter": {**ADAPTER, "merged": True}}, {"adapter": ADAPTER}, "note", None),
        ({}, {"dtype": None}, "error", Code.DTYPE_NOT_APPLIED),
        ({"temperature": 0.7}, {}, "error", Code.TEMPERATURE),
        ({}, {"decode_support": "kept by top_p and top_k, renormalised"}, "error", Code.TRUNCATED_SUPPORT),
        ({}, {"min_p": 0.1}, "error", Code.TRUNCATED_SUPPORT),
        ({}, {"repetition_penalty": 1.1}, "error", None),
        ({}, {"generation_config": "auto"}, "warning", Code.TRUNCATED_SUPPORT),
        ({}, {"logprobs_mode": "raw_logprobs"}, "error", Code.TEMPERATURE),
        ({"dropout": "on"}, {}, "error", Code.NOT_REPEATABLE),
        ({}, {"prefix_caching": True}, "note", Code.NOT_REPEATABLE),
        ({"rope_inv_freq_dtype": "bf16"}, {}, "warning", Code.POSITIONS),
        ({}, {"quantization": "fp8"}, "warning", Code.ONE_SIDED_DTYPE),
        ({}, {"kv_cache_dtypes": ["float8_e4m3fn"]}, "warning", Code.ONE_SIDED_DTYPE),
        ({}, {"state_dtypes": ["bfloat16"]}, "warning", Code.ONE_SIDED_DTYPE),
        ({"log_softmax_dtype": "bf16"}, {}, "warning", Code.ONE_SIDED_DTYPE),
        ({"lm_head_dtype": "fp32"}, {}, "note", None),
        ({"experts_dtype": "fp32"}, {}, "warning", Code.ONE_SIDED_DTYPE),
        ({"attention": "sdpa", "sdpa_leaves_out": "the soft cap"}, {}, "error", None),
        ({"attention": "eager", "sdpa_leaves_out": "the soft cap"}, {}, "note", None),
        ({}, {"images": {"other_pixels": 1, "num_prompts": 4}}, "error", Code.CONFIGURATION),
        ({"images": {"attention": "both ways"}}, {"images": {"attention": "causal"}}, "error", Code.CONFIGURATION),
        ({}, {"bounded_by_probe": {"max_num_batched_tokens": 588}}, "note", None),
        ({}, {"chosen_by_probe": {"enforce_eager": True}}, "note", None),
        ({"config": {**CONFIG, "rope_parameters.rope_theta": 5e5}}, {}, "error", Code.POSITIONS),
        ({"config": {**CONFIG, "sliding_window": 16}}, {}, "error", Code.POSITIONS),
        ({"config": {**CONFIG, "num_experts_per_tok": 1}}, {}, "error", Code.ROUTING),
        ({"config": {**CONFIG, "tie_word_embeddings": False}}, {}, "error", Code.CONFIGURATION),
        ({"config": {**CONFIG, "rms_norm_eps": 1e-3}}, {}, "error", Code.CONFIGURATION),
    ],
)
def test_each_difference_is_found_once(
    train: dict[str, Any], infer: dict[str, Any], level: str, code: Code | None
) -> None:
    assert [(difference.level, difference.code) for difference in preflight(sides(train, infer))] == [(level, code)]


@pytest.mark.parametrize("lossy", [{"fp32_products_cuda.matmul": "tf32"}, {"float32_matmul_precision": "high"}])
def test_tf32_is_told_for_an_fp32_pair_only(lossy: dict[str, str]) -> None:
    train, infer = {**TRAIN, "dtype": "fp32", "lm_head_dtype": None}, {**INFER, "dtype": "fp32", "kv_cache_dtypes": []}
    side = train if "fp32_products_cuda.matmul" in lossy else infer
    side.update(lossy)
    assert [difference.code for difference in preflight(Sides(Dtype.FP32, Dtype.FP32, train, infer))] == [
        Code.ONE_SIDED_DTYPE
    ]
    assert preflight(sides(train={key: value for key, value in lossy.items() if key.startswith("fp32")})) == []


def test_which_library_multiplies_in_fp32_is_no_rounding() -> None:
    train, infer = {**TRAIN, "dtype": "fp32", "lm_head_dtype": None}, {**INFER, "dtype": "fp32", "kv_cache_dtypes": []}
    for by_onednn in (False, True):
        assert preflight(Sides("fp32", "fp32", {**train, "fp32_products_by_onednn": by_onednn}, infer)) == []


def test_a_cache_of_bytes_is_named_by_the_engines_setting() -> None:
    [difference] = preflight(sides(infer={"kv_cache_dtypes": ["uint8"], "kv_cache_dtype": "fp8"}))
    assert difference.what == "the engine keeps keys and values in fp8"


def test_a_state_in_fp32_and_a_factor_of_one_that_one_side_leaves_out_are_nothing() -> None:
    factor = {**CONFIG, "rope_parameters.partial_rotary_factor": 1}
    assert preflight(sides({}, {"state_dtypes": ["float32"], "config": factor})) == []
    assert preflight(sides({}, {"state_dtypes": []})) == []
    half = {**CONFIG, "rope_parameters.partial_rotary_factor": 0.5}
    assert [finding.code for finding in preflight(sides({}, {"config": half}))] == [Code.POSITIONS]


def test_what_is_as_asked_is_not_told() -> None:
    assert preflight(sides({"experts_dtype": "bf16", "attention": "sdpa"}, {"bounded_by_probe": {}})) == []
    assert preflight(sides(infer={"bounded_by_probe": {"kv_cache_memory_bytes": 1}})) == []
    assert preflight(sides(infer={"enforce_eager": True, "chosen_by_probe": {}})) == []
    seen_alike = {"images": {"attention": "causal", "other_pixels": 0, "num_prompts": 4}}
    assert preflight(sides({"images": {"attention": "causal"}}, seen_alike)) == []


def test_a_step_that_the_probe_made_smaller_names_the_flag_that_restores_it() -> None:
    [difference] = preflight(sides(infer={"bounded_by_probe": {"max_num_batched_tokens": 588}}))
    assert "588 tokens a step" in difference.what
    assert "--vllm.max_num_batched_tokens" in difference.advice


def test_frequencies_that_follow_the_length_are_worth_a_note() -> None:
    [finding] = preflight(sides({"rope_follows_length_beyond": 4096}))
    assert (finding.level, finding.code) == ("note", Code.POSITIONS)
    assert "beyond 4096 tokens: here each longer sequence is computed alone" in finding.what
    assert preflight(sides({"rope_follows_length_beyond": None})) == []


def test_bos_twice_is_worth_a_note() -> None:
    assert [difference.code for difference in preflight(sides(doubled_first_token=1))] == [Code.PROMPT_PREFIX]


def test_the_findings_of_several_pairs_are_told_once_and_errors_first() -> None:
    wrong = sides({"temperature": 0.7}, {"prefix_caching": True})
    assert [difference.level for difference in preflight_of_run([wrong, wrong])] == ["error", "note"]


def test_facts_leave_out_what_changes_no_log_prob() -> None:
    config = {"dtype": "bfloat16", "_name_or_path": "x", "rope": {"theta": 1.0, "none": None}, "layers": ["a", 2]}
    assert forward_facts(config) == {"rope.theta": 1.0, "layers": ["a", 2]}


def test_a_mixture_of_experts_is_known_by_its_number_of_experts() -> None:
    assert has_experts({"num_local_experts": 8})
    assert not has_experts({"hidden_size": 64})


ASKED = {
    "echoes_prompt_ids": True,
    "log_probs": "after temperature",
    "again": 0.0,
    "in_a_crowd": 0.0,
    "behind_the_cache": 0.0,
    "same_tokens": True,
    "refuses_unknown_ids": True,
    "weight_version": "step-7",
    "sampled_as_said": 0.4,
}
SERVER = {
    "engine": "server", "dtype_known_from": "the server", "weights_are_labelled": True, "prefill": True, "asked": ASKED,
}  # fmt: skip


def test_a_server_that_says_all_and_does_as_it_says_is_not_accused() -> None:
    assert preflight(sides({}, SERVER)) == []


@pytest.mark.parametrize(
    ("applied", "settings_asked_for", "setting", "level", "words"),
    [
        ({"prefill": False}, {}, "prefill", "note", "nothing is known of decoding against prefill"),
        ({"dtype_known_from": "the side's own words"}, {}, "dtype", "note", "bf16 is what the side was given"),
        ({"weights_are_labelled": False}, {}, "weight_version", "note", "does not label its weights"),
        (
            {},
            {"echoes_prompt_ids": False},
            "asked.echoes_prompt_ids",
            "warning",
            "does not echo the prompt's token ids",
        ),
        ({}, {"refuses_unknown_ids": False}, "asked.refuses_unknown_ids", "warning", "may serve another model"),
        (
            {},
            {"sampled_as_said": 1e-9},
            "asked.sampled_as_said",
            "error",
            "does not draw its tokens from the log-probs",
        ),
        ({"replay_temperature": 0.7}, {"log_probs": None}, "asked.log_probs", "warning", "is not known"),
        (
            {"logprobs_mode": "raw_logprobs"},
            {},
            "logprobs_mode",
            "error",
            "not those of the distribution it samples from",
        ),
        (
            {},
            {"in_a_crowd": 0.03},
            "asked.again, asked.in_a_crowd, asked.behind_the_cache",
            "note",
            "0.0300 nats when asked among others",
        ),
    ],
)
def test_what_a_server_does_not_say_or_does_otherwise_is_found_once(
    applied: dict[str, Any], settings_asked_for: dict[str, Any], setting: str, level: str, words: str
) -> None:
    [difference] = [
        finding
        for finding in preflight(sides({}, {**SERVER, **applied, "asked": {**ASKED, **settings_asked_for}}))
        if finding.setting != "temperature"
    ]
    assert (difference.setting, difference.level) == (setting, level)
    assert words in difference.what


@pytest.mark.parametrize(
    ("root", "settings"), [("/models/policy-12/", []), ("org/other", ["model_root"]), ("policy-12", []), (None, [])]
)
def test_a_server_that_says_another_name_than_the_checkpoints_is_told(root: str | None, settings: list[str]) -> None:
    checkpoint = ModelIdentity(
        name="ckpt/policy-12", folder="/here/ckpt/policy-12", fingerprint="a", architecture="X", context_length=8,
        checkpoint_dtype="bfloat16", weight_bytes=1, has_tokenizer=True,
    )  # fmt: skip
    findings = preflight(sides({}, {**SERVER, "model_root": root}, checkpoints=(checkpoint, checkpoint)))
    assert [finding.setting for finding in findings] == settings


def test_a_server_that_serves_the_adapter_that_its_side_was_given_is_not_told() -> None:
    checkpoint = ModelIdentity(
        name="ckpt/policy", folder="/here/ckpt/policy", fingerprint="a", architecture="X", context_length=8,
        checkpoint_dtype="bfloat16", weight_bytes=1, has_tokenizer=True,
    )  # fmt: skip
    adapter = {"folder": "adapters/lora-3", "fingerprint": "a"}
    serving = {**SERVER, "model_root": "/adapters/lora-3", "adapter": adapter}
    assert preflight(sides({"adapter": adapter}, serving, checkpoints=(checkpoint, checkpoint))) == []


def test_an_id_that_a_server_was_not_asked_about_accuses_nobody() -> None:
    unknown = {**ASKED, "refuses_unknown_ids": None, "sampled_as_said": None, "behind_the_cache": None}
    assert preflight(sides({}, {**SERVER, "asked": unknown})) == []


@pytest.mark.parametrize(
    ("settings_asked_for", "found"),
    [
        ({"processes": 1}, []),
        ({"processes": None, "again": 0.03}, []),
        ({"processes": 2}, [("note", "2 servers answer at this address and are measured as one")]),
        (
            {"processes": 2, "again": 0.4},
            [("warning", "2 servers answer at this address and give one question answers")],
        ),
        ({"processes": None, "in_a_crowd": 0.6}, [("warning", "what answers at this address gives one question")]),
        ({"processes": None, "in_a_crowd": 0.21}, []),
        ({"processes": 1, "in_a_crowd": 0.6}, []),
    ],
)
def test_replicas_behind_one_address_are_told_by_what_they_say_or_by_their_answers(
    settings_asked_for: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    findings = preflight(sides({}, {**SERVER, "asked": {**ASKED, **settings_asked_for}}))
    mixture = [one for one in findings if one.setting in ("asked.processes", "asked.again, asked.in_a_crowd")]
    assert [one.level for one in mixture] == [level for level, _ in found]
    assert all(one.what.startswith(words) for one, (_, words) in zip(mixture, found, strict=True))
