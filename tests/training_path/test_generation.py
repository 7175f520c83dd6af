"""What pi samples follows the distribution that pi is scored with."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import EncodedPrompt, TokenSequence
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.generation import GeneratedResponse, Sampler
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

PROMPTS = [EncodedPrompt(f"p{size}", list(range(3, 3 + size)), "") for size in (2, 9, 5, 14)]
SDPA = TrainingPathSettings(attention="sdpa")


def sampled(
    folder: Path, dtype: Dtype = Dtype.FP32, *, prompts: list[EncodedPrompt] = PROMPTS, seed: int = 0, **sampling: float
) -> list[GeneratedResponse]:
    settings = SamplingSettings(**{"max_new_tokens": 12, **sampling})
    with Sampler(folder, dtype, SDPA, settings) as sampler:
        return sampler.sample(prompts, None, seed)


def surprise(folder: Path, prompts: list[EncodedPrompt], responses: list[GeneratedResponse]) -> np.ndarray:
    """-log pi less the entropy at every token, by the scorer at temperature 1; its mean is 0 where pi was sampled."""
    batch = [
        TokenSequence(prompt.prompt_id, prompt.token_ids, response.token_ids)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    with Scorer.load(folder, Dtype.FP32, SDPA) as scorer:
        scored = scorer.score_batch(batch)
    surprises = []
    for scores in scored:
        assert scores.entropy_nats is not None
        surprises.append(-scores.logprobs - scores.entropy_nats)
    return np.concatenate(surprises)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has no end token, so every response is as long as it may be."""
    return make_checkpoint(tmp_path_factory.mktemp("endless") / "llama", "llama", eos_token_id=None)


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP16, Dtype.BF16])
def test_a_batch_and_its_seed_decide_the_responses(endless: Path, dtype: Dtype) -> None:
    assert sampled(endless, dtype) == sampled(endless, dtype)
    assert sampled(endless, dtype) != sampled(endless, dtype, seed=1)


def test_almost_cold_sampling_takes_the_scorers_most_probable_token_whatever_the_padding(endless: Path) -> None:
    responses = sampled(endless, temperature=1e-3)
    batch = [TokenSequence("", p.token_ids, r.token_ids) for p, r in zip(PROMPTS, responses, strict=True)]
    with Scorer.load(endless, Dtype.FP32, SDPA) as scorer:
        for response, scores in zip(responses, scorer.score_batch(batch), strict=True):
            assert scores.top1_ids is not None
            assert scores.top1_ids.tolist() == response.token_ids


@pytest.mark.parametrize(("temperature", "fits"), [(1.0, True), (1.2, False)])
def test_tokens_are_as_surprising_as_the_scorers_entropy_says(endless: Path, temperature: float, fits: bool) -> None:
    prompts = PROMPTS * 64
    surprises = surprise(endless, prompts, sampled(endless, prompts=prompts, temperature=temperature))
    error = surprises.std() / np.sqrt(surprises.size)
    assert (abs(surprises.mean()) < 4 * error) == fits


def test_a_response_ends_with_its_end_token_or_is_cut(checkpoint: Callable[[str], Path]) -> None:
    prompts = PROMPTS * 64
    responses = sampled(checkpoint("llama"), prompts=prompts, max_new_tokens=40)
    stopped = [response for response in responses if response.finish_reason == "stop"]
    cut = [response for response in responses if response.finish_reason == "length"]
    assert stopped
    assert all(one.token_ids[-1] == 258 and 258 not in one.token_ids[:-1] for one in stopped)
    assert all(len(one.token_ids) == 40 and 258 not in one.token_ids for one in cut)


def test_the_tokenizers_end_token_ends_a_response_too(endless: Path) -> None:
    with Sampler(endless, Dtype.FP32, SDPA, SamplingSettings(max_new_tokens=40)) as sampler:
        responses = sampler.sample(PROMPTS * 64, 7, seed=0)
    assert any(response.token_ids[-1] == 7 and response.finish_reason == "stop" for response in responses)
    assert all(7 not in response.token_ids[:-1] for response in responses)
