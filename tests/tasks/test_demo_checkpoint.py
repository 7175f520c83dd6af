import json
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mismatch_probe.config.model import EngineSettings, PromptSettings, SamplingSettings
from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import start_engine
from mismatch_probe.records.sequences import SampleRequest
from mismatch_probe.tasks import check_lengths, encode_prompts, load_prompts, load_tokenizer, verify

TOKENIZER = load_tokenizer(DEMO_CHECKPOINT)
Responses = tuple[list[bool], list[int], list[bool]]
CONFIG = json.loads((DEMO_CHECKPOINT / "config.json").read_text())


def test_the_weights_are_bf16_as_their_config_says_and_number_between_one_and_five_million():
    weights = load_file(DEMO_CHECKPOINT / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert CONFIG["dtype"] == "bfloat16"
    assert 1_000_000 <= sum(tensor.numel() for tensor in weights.values()) <= 5_000_000
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_folder_is_at_most_ten_megabytes_and_has_a_model_card():
    assert sum(path.stat().st_size for path in DEMO_CHECKPOINT.iterdir() if path.is_file()) <= 10_000_000
    assert (DEMO_CHECKPOINT / "README.md").read_text().startswith("---\n")


def test_the_generation_config_changes_no_distribution():
    generation = json.loads((DEMO_CHECKPOINT / "generation_config.json").read_text())
    assert generation.get("temperature", 1.0) == 1.0
    assert generation.get("top_p", 1.0) == 1.0
    assert generation.get("top_k", 0) == 0
    assert "repetition_penalty" not in generation
    assert generation["eos_token_id"] == TOKENIZER.eos_token_id


@pytest.mark.slow
@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_any_text_survives_encoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_digit_is_one_token():
    assert len(TOKENIZER.encode("31415926")) == 8


def test_no_token_id_is_outside_the_embedding():
    assert len(TOKENIZER) <= CONFIG["vocab_size"] <= 512


def test_a_sum_is_templated_as_in_training():
    [prompt] = encode_prompts(load_prompts(PromptSettings(source="sums:easy", num_prompts=1)), TOKENIZER, "auto")
    assert prompt.text.startswith("<|im_start|>user\nsum 1:")
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.token_ids.count(TOKENIZER.convert_tokens_to_ids("<|im_start|>")) == 2


def test_the_longest_sum_fits_with_1024_new_tokens():
    prompts = encode_prompts(load_prompts(PromptSettings(source="sums:terms=99", num_prompts=1)), TOKENIZER, "auto")
    check_lengths(prompts, 1024, CONFIG["max_position_embeddings"])


@pytest.fixture(scope="module")
def respond() -> Iterator[Callable[[str, int, int], Responses]]:
    """Sampled by the engine at T=1: which responses are right, their tokens, and which of them end by themselves."""
    context = CONFIG["max_position_embeddings"]
    load = (str(DEMO_CHECKPOINT), Dtype.FP32, EngineSettings(), SamplingSettings())
    with start_engine(*load, max_model_len=context) as engine:

        def respond(source: str, num_prompts: int, max_new_tokens: int) -> Responses:
            prompts = load_prompts(PromptSettings(source=source, num_prompts=num_prompts))
            encoded = encode_prompts(prompts, TOKENIZER, "auto")
            sample_requests = [SampleRequest(str(seed), prompt, seed) for seed, prompt in enumerate(encoded)]
            sampled = engine.sample(sample_requests, SamplingSettings(max_new_tokens=max_new_tokens))
            ended = [one.finish_reason == "stop" for one in sampled]
            texts = [TOKENIZER.decode(one.sequence.token_ids, skip_special_tokens=True) for one in sampled]
            right = [
                end and verify("sums", prompt.answer or "", text)
                for prompt, text, end in zip(prompts, texts, ended, strict=True)
            ]
            return right, [len(one.sequence.token_ids) for one in sampled], ended

        yield respond


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_medium_split_leaves_reinforcement_learning_something_to_learn(respond):
    right, lengths, ended = respond("sums:medium", 64, 96)
    assert 0.3 <= sum(right) / len(right) <= 0.6
    assert 40 <= sorted(lengths)[len(lengths) // 2] <= 70
    assert sum(ended) >= 0.95 * len(ended)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_long_sums_give_long_responses_that_end_by_themselves(respond):
    _, lengths, ended = respond("sums:long", 8, 1300)
    assert sum(ended) >= 0.8 * len(ended)
    assert sorted(lengths)[len(lengths) // 4] > 500
    assert max(lengths) > 1000
