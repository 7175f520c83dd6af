"""Real vLLM on tiny checkpoints: what it samples, what it says of it, and that faults are seen."""

import json

import numpy as np
import pytest
from scipy.stats import chisquare

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence
from tests.engines.conftest import CONTEXT, gaps, requests, same
from tests.tiny_models import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PLAIN = SamplingSettings(max_new_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def engine(start, checkpoint):
    return start(checkpoint, max_new_tokens=64)


@pytest.fixture(scope="module")
def sampled(engine):
    return engine.sample(requests(), PLAIN)


def scored(samples):
    return [sample.scores for sample in samples]


def sequences(samples):
    return [sample.sequence for sample in samples]


def test_a_response_comes_back_for_each_request_in_order(sampled):
    sample_requests = requests()
    assert [sample.sequence.id for sample in sampled] == [request.id for request in sample_requests]
    assert [sample.sequence.prompt_token_ids for sample in sampled] == [
        list(one.prompt.token_ids) for one in sample_requests
    ]
    for sample in sampled:
        assert len(sample.sequence.token_ids) == len(sample.scores.logprobs) == len(sample.token_texts)


def test_every_sampled_token_has_a_finite_log_prob(sampled):
    assert all(np.isfinite(one.logprobs).all() and (one.logprobs <= 0).all() for one in scored(sampled))


def test_the_same_call_twice_gives_the_same_ids_and_bits(engine, sampled):
    assert same(engine.sample(requests(), PLAIN), sampled)


def test_the_requests_that_are_done_are_told_and_change_nothing(engine, sampled, monkeypatch):
    messages = []
    monkeypatch.setattr(engine, "on_finished", lambda done, of: messages.append((done, of)))
    assert same(engine.sample(requests(), PLAIN), sampled)
    assert messages == [(done, 6) for done in range(1, 7)]


def test_a_request_samples_the_same_ids_in_any_company_and_order(engine, sampled):
    alone = [engine.sample([request], PLAIN)[0] for request in requests()]
    assert sequences(alone) == sequences(sampled)
    assert sequences(reversed(engine.sample(requests()[::-1], PLAIN))) == sequences(sampled)


def test_another_seed_samples_other_ids(engine, sampled):
    assert sequences(engine.sample(requests(first_seed=99), PLAIN)) != sequences(sampled)


def test_sampled_tokens_follow_the_log_probs_reported_for_them(engine):
    """An engine that is biased, or reports another distribution than it draws from, fails."""
    one_token = PLAIN.model_copy(update={"max_new_tokens": 1})
    prompt = requests()[0].prompt
    draws = engine.sample([type(requests()[0])(f"d{seed}", prompt, seed) for seed in range(4000)], one_token)
    token_ids = np.array([draw.sequence.token_ids[0] for draw in draws])
    probs = dict(zip(token_ids, np.exp([draw.scores.logprobs[0] for draw in draws]), strict=True))
    common = [token for token, prob in probs.items() if prob * len(draws) >= 10]
    counts = [int((token_ids == token).sum()) for token in common]
    expected = [float(probs[token]) * len(draws) for token in common]
    observed = np.array([*counts, len(draws) - sum(counts)])
    assert chisquare(observed, [*expected, len(draws) - sum(expected)]).pvalue > 1e-3


def test_decode_and_prefill_agree_in_fp32(engine, sampled):
    replayed = engine.replay(sequences(sampled))
    assert np.abs(gaps(scored(sampled), replayed)).max() < 1e-5
    for sample, replay in zip(sampled, replayed, strict=True):
        np.testing.assert_array_equal(sample.scores.top1_ids, replay.top1_ids)


def test_the_log_probs_are_those_of_the_model_by_transformers(checkpoint, sampled):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for sample in sampled:
        ids = torch.tensor([[*sample.sequence.prompt_token_ids, *sample.sequence.token_ids]])
        with torch.inference_mode():
            rows = model(ids).logits[0, :-1].log_softmax(-1)
        truth = rows.gather(1, ids[0, 1:, None])[-len(sample.sequence.token_ids) :, 0].numpy()
        np.testing.assert_allclose(sample.scores.logprobs, truth, atol=2e-5)


def test_replay_leaves_no_trace_in_later_sampling(engine, sampled):
    engine.replay(sequences(sampled))
    assert same(engine.sample(requests(), PLAIN), sampled)


def test_an_eager_engine_compiles_nothing(engine):
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    engine.replay(sequences(engine.sample(requests(), PLAIN)))
    assert not counters["frames"]


def test_an_empty_batch_is_an_empty_result(engine):
    assert engine.sample([], PLAIN) == []
    assert engine.replay([]) == []


def test_a_response_leaves_one_position_for_its_replay(engine):
    endless = PLAIN.model_copy(update={"max_new_tokens": 10_000, "ignore_eos": True})
    full = engine.sample(requests(1), endless)[0]
    assert full.finish_reason == "length"
    assert full.sequence.num_tokens == CONTEXT - 1
    assert np.abs(gaps([full.scores], engine.replay([full.sequence]))).max() < 1e-5


def test_a_prompt_that_fills_the_context_names_itself_and_the_flag(engine):
    request = requests(1)[0]
    filling = type(request)("long", type(request.prompt)("p-long", [1] * (CONTEXT - 1), ""), 0)
    with pytest.raises(UsageError, match=r"prompt p-long has 191 tokens.*--vllm\.max_model_len"):
        engine.sample([filling], PLAIN)


def test_a_sequence_too_long_to_replay_names_itself_and_the_flag(engine):
    with pytest.raises(UsageError, match=r"too-long has 192 tokens.*--vllm\.max_model_len to 193"):
        engine.replay([TokenSequence("too-long", [1] * 100, [2] * 92)])


def test_a_temperature_the_engine_was_not_started_for_is_refused(engine):
    with pytest.raises(UsageError, match=r"started for temperature 1\.0"):
        engine.sample(requests(1), SamplingSettings(temperature=0.5))


def test_the_effective_settings_say_what_ran_and_are_json(engine):
    settings = engine.effective_settings()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["dtype"] == "fp32"
    assert settings["parameter_dtypes"].keys() == {"float32"}
    assert settings["kv_cache_dtypes"] == ["float32"]
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert settings["prefix_caching"] is False
    assert settings["enforce_eager"] is True
    assert settings["chosen_by_probe"] == {"enforce_eager": True, "skip_tokenizer_init": True}
    assert settings["max_num_seqs"] == 32
    assert settings["end_of_sequence_ids"] == [258]
    assert settings["environment"]["VLLM_NO_USAGE_STATS"] == "1"
    assert settings["attention_backends"]
    assert settings["versions"]["torch"]


def test_other_weights_on_replay_are_seen(start, tmp_path, sampled):
    other = start(make_checkpoint(tmp_path, "qwen3", seed=1), max_new_tokens=64)
    assert np.abs(gaps(scored(sampled), other.replay(sequences(sampled)))).mean() > 0.1


def test_a_whole_distribution_is_the_one_that_was_sampled_from(start, checkpoint):
    plain = SamplingSettings(max_new_tokens=24, temperature=0.7, top_k=5)
    engine = start(checkpoint, max_new_tokens=24, temperature=0.7, top_k=5)
    sample = engine.sample(requests(1), plain)[0]
    ids = sample.sequence.token_ids
    rows = engine.distributions([[*sample.sequence.prompt_token_ids, *ids[:place]] for place in range(len(ids))])
    assert rows.shape == (len(ids), engine.vocab_size)
    np.testing.assert_allclose(np.exp(rows.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    assert (np.isfinite(rows).sum(axis=1) == 5).all()
    np.testing.assert_allclose(rows[np.arange(len(ids)), ids], sample.scores.logprobs, atol=5e-5)
