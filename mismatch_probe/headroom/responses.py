# mypy: allow-untyped-calls
"""Prompts, the responses that the FP32 model samples to them, and what those earn."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.headroom import DEFAULT_NUM_PROMPTS, HeadroomSettings
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.headroom.computing import computing
from mismatch_probe.provenance import checkpoint
from mismatch_probe.records.sequences import EncodedPrompt, TokenSequence
from mismatch_probe.tasks import check_lengths, encode_prompts, load_prompts, load_tokenizer, tokenizer_for
from mismatch_probe.tasks.rewards import Answered, Reward, load_reward, score_responses
from mismatch_probe.training_path.generation import end_token_ids, generate

SAMPLED_BY = "transformers generate, in fp32"


@dataclass(frozen=True)
class Problems:
    """Encoded prompts, the reward, None where the prompts come with none, and the tokenizer that a reward needs."""

    prompts: list[EncodedPrompt]
    tokenizer: Any
    reward: Reward | None


@dataclass(frozen=True)
class RewardedResponses:
    """Sampled sequences with the prompt and the reward of each [N].

    stand_in: the rewards say nothing (no prompt has two that differ), so every other response has 1 and the rest 0.
    """

    sequences: list[TokenSequence]
    prompt_ids: list[str]
    rewards: list[float]
    mean_reward: float | None
    stand_in: bool


def load_problems(folder: Path, settings: HeadroomSettings) -> Problems:
    """
    Raises:
        UsageError: the prompts, the tokenizer or the reward cannot be used.
        MissingExtra: a package that they need is not installed.
    """
    wanted = settings.prompts.num_prompts or DEFAULT_NUM_PROMPTS
    prompts = load_prompts(settings.prompts, seed=settings.sampling.seed)[:wanted]
    has_reward = settings.reward is not None or prompts[0].task is not None
    reward = load_reward(settings.reward, prompts) if has_reward else None
    trust = settings.model.trust_remote_code
    tokenizer = (
        load_tokenizer(folder, trust_remote_code=trust)
        if has_reward
        else tokenizer_for(prompts, folder, trust_remote_code=trust)
    )
    config = checkpoint.read_config(folder)
    context_length = checkpoint.context_length(config)
    template = settings.prompts.chat_template
    encoded = encode_prompts(prompts, tokenizer, template, checkpoint.vocab_size(config), context_length)
    check_lengths(encoded, settings.sampling.max_new_tokens, context_length)
    return Problems(encoded, tokenizer, reward)


def sample_responses(
    model: PreTrainedModel, problems: Problems, settings: HeadroomSettings, tell: Callable[[str], None]
) -> RewardedResponses:
    """Groups of responses, prompt after prompt, in FP32; `tell` hears how far that is.

    Raises:
        BrokenRecord: the model's answer to the first prompt is not finite even in FP32.
    """
    _require_finite(model, problems.prompts[0].token_ids)
    sampling, ends = settings.sampling, end_token_ids(model)
    sequences, prompt_ids, answered = [], [], []
    for number, prompt in enumerate(problems.prompts):
        tell(f"prompt {number + 1} of {len(problems.prompts)}")
        seed = int(np.random.SeedSequence([sampling.seed, number]).generate_state(1)[0])
        with computing(model.device):
            responses = generate(model, [prompt.token_ids], sampling, ends, seed, samples=sampling.samples_per_prompt)
        for sample, response in enumerate(responses):
            sequences.append(TokenSequence(f"{prompt.prompt_id}/{sample}", prompt.token_ids, response.token_ids))
            prompt_ids.append(prompt.prompt_id)
            if problems.reward is not None:
                text = problems.tokenizer.decode(response.token_ids, skip_special_tokens=True)
                answered.append(Answered(prompt, text, truncated=response.finish_reason == "length"))
    if problems.reward is None:
        return _with_stand_in(sequences, prompt_ids, mean_reward=None)
    rewards = score_responses(problems.reward, answered)
    mean_reward = float(rewards.mean())
    if not any(
        len({reward for reward, of in zip(rewards, prompt_ids, strict=True) if of == prompt_id}) > 1
        for prompt_id in prompt_ids
    ):
        return _with_stand_in(sequences, prompt_ids, mean_reward)
    return RewardedResponses(sequences, prompt_ids, rewards.tolist(), mean_reward, stand_in=False)


def _require_finite(model: PreTrainedModel, token_ids: list[int]) -> None:
    with torch.no_grad(), computing(model.device):
        logits = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits
    if not bool(logits.isfinite().all()):
        raise BrokenRecord(
            f"the logits of {model.name_or_path} are not finite even in FP32; give --model an intact checkpoint"
        )


def _with_stand_in(
    sequences: list[TokenSequence], prompt_ids: list[str], mean_reward: float | None
) -> RewardedResponses:
    rewards = [float(index % 2 == 0) for index in range(len(sequences))]
    return RewardedResponses(sequences, prompt_ids, rewards, mean_reward, stand_in=True)
