"""Responses for an RL loss, and the loss whose gradients FP16 must hold."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mismatch_probe.compare.cost.headroom import MOST_SAMPLED_TOGETHER
from mismatch_probe.config.examinations import HEADROOM_PROMPTS, HeadroomSettings
from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.provenance import checkpoint
from mismatch_probe.records.sequences import EncodedPrompt, TokenSequence
from mismatch_probe.tasks import check_lengths, encode_prompts, load_prompts, load_tokenizer, tokenizer_for
from mismatch_probe.tasks.rewards import Reward, TextResponse, load_reward, score_responses
from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import GROUP_RULES, Objective, build_objective
from mismatch_probe.train.objectives.losses import plan_loss, policy_loss
from mismatch_probe.training_path.arithmetic import CpuProducts, true_fp32
from mismatch_probe.training_path.batching import pad_batch, plan_batches
from mismatch_probe.training_path.generation import end_token_ids, generate
from mismatch_probe.training_path.memory import memory_errors_named


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """FP32 in IEEE FP32, and on a CPU 16-bit products added up in FP32 as tensor cores do."""
    with ExitStack() as stack:
        stack.enter_context(true_fp32())
        if device.type == "cpu":
            stack.enter_context(CpuProducts())
        yield


SAMPLED_BY = "transformers generate, in fp32"


@dataclass(frozen=True)
class Problems:
    """Encoded prompts, the reward, None where the prompts come with none, and the tokenizer that a reward needs."""

    prompts: list[EncodedPrompt]
    tokenizer: Any
    reward: Reward | None


@dataclass(frozen=True)
class RewardedResponses:
    """Sampled sequences with the prompt and the reward of each [N]."""

    sequences: list[TokenSequence]
    prompt_ids: list[str]
    rewards: list[float]
    mean_reward: float | None
    stand_in: bool
    """The rewards say nothing (no prompt has two that differ), so every other response has 1 and the rest 0."""


def load_problems(folder: Path, settings: HeadroomSettings) -> Problems:
    """"""
    count = settings.prompts.num_prompts or HEADROOM_PROMPTS
    prompts = load_prompts(settings.prompts, seed=settings.sampling.seed)[:count]
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
    encoded_prompts = encode_prompts(prompts, tokenizer, template, checkpoint.vocab_size(config), context_length)
    check_lengths(encoded_prompts, settings.sampling.max_new_tokens, context_length)
    return Problems(encoded_prompts, tokenizer, reward)


def sample_responses(
    model: PreTrainedModel, problems: Problems, settings: HeadroomSettings, tell: Callable[[str], None]
) -> RewardedResponses:
    """Groups of responses, prompt after prompt, in FP32; `tell` receives how far that is."""
    _require_finite(model, problems.prompts[0].token_ids)
    sampling, ends = settings.sampling, end_token_ids(model)
    sequences, prompt_ids, texts = [], [], []
    samples = sampling.samples_per_prompt
    num_together = max(1, MOST_SAMPLED_TOGETHER // samples)
    for first in range(0, len(problems.prompts), num_together):
        prompts = problems.prompts[first : first + num_together]
        tell(f"{first + len(prompts)} of {len(problems.prompts)} prompts")
        seed = int(np.random.SeedSequence([sampling.seed, first]).generate_state(1)[0])
        with computing(model.device):
            responses = generate(model, [prompt.token_ids for prompt in prompts], sampling, ends, seed, samples=samples)
        for row, response in enumerate(responses):
            prompt, sample = prompts[row // samples], row % samples
            sequences.append(TokenSequence(f"{prompt.prompt_id}/{sample}", prompt.token_ids, response.token_ids))
            prompt_ids.append(prompt.prompt_id)
            if problems.reward is not None:
                text = problems.tokenizer.decode(response.token_ids, skip_special_tokens=True)
                texts.append(TextResponse(prompt, text, truncated=response.finish_reason == "length"))
    if problems.reward is None:
        return _with_stand_in(sequences, prompt_ids, mean_reward=None)
    rewards = score_responses(problems.reward, texts)
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


def load_objective(settings: HeadroomSettings) -> Objective:
    """
    Raises:
        UsageError: no such objective, one with a critic, whose values no checkpoint holds, or one that compares the
            responses to a prompt where there is but one.
    """
    objective = build_objective(settings.objective.name, settings.objective.overrides)
    if objective.critic is not None:
        raise UsageError(
            f"objective {objective.name} needs a critic, which a checkpoint does not hold; give --objective grpo or "
            "another without one"
        )
    if objective.advantage in GROUP_RULES and settings.sampling.samples_per_prompt < 2:
        raise UsageError(
            f"objective {objective.name} compares the responses to one prompt, and there is only one; give "
            "--samples-per-prompt 2 or more, or --objective reinforce"
        )
    return objective


class ResponseLoss:
    """The first update after sampling: pi is the policy that sampled, so every importance ratio is 1."""

    def __init__(self, objective: Objective, responses: RewardedResponses, max_new_tokens: int) -> None:
        lengths = [len(sequence.token_ids) for sequence in responses.sequences]
        nothing_T = torch.zeros(sum(lengths), dtype=torch.float64)
        batch = RolloutBatch(
            rewards_N=torch.tensor(responses.rewards, dtype=torch.float64),
            group_ids_N=torch.from_numpy(np.unique(responses.prompt_ids, return_inverse=True)[1]),
            lengths_N=torch.tensor(lengths),
            included_N=torch.ones(len(lengths), dtype=torch.bool),
            old_logprobs_T=nothing_T,
            mu_logprobs_T=nothing_T,
        )
        self._update = plan_loss(objective, batch, max_new_tokens).update()

    def __call__(self, logprobs_T: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The share of some responses, with their log-probs in that order."""
        update = self._update
        batch = update.plan.batch
        old_T = batch.old_logprobs_T.clone()
        tokens = batch.responses.tokens_of(torch.tensor(rows))
        old_T[tokens] = logprobs_T.detach().double().cpu()
        plan = replace(update.plan, batch=replace(batch, old_logprobs_T=old_T))
        return policy_loss(replace(update, plan=plan), logprobs_T, rows).loss


@dataclass(frozen=True)
class BatchedResponses:
    """`batches` are numbers of sequences that share a forward pass; `loss` takes their log-probs and numbers."""

    sequences: list[TokenSequence]
    batches: list[list[int]]
    loss: ResponseLoss
    vocab_size: int
    temperature: float

    @classmethod
    def plan(
        cls, sequences: list[TokenSequence], loss: ResponseLoss, *, vocab_size: int, temperature: float, tokens: int
    ) -> "BatchedResponses":
        """Batches of up to `tokens` padded tokens."""
        batches = plan_batches([sequence.num_tokens for sequence in sequences], tokens)
        return cls(sequences, batches, loss, vocab_size, temperature)

    def logprobs(self, model: PreTrainedModel, rows: Sequence[int]) -> torch.Tensor:
        """Log-probs [T] in nats of a batch's response tokens, in order, computed in FP32 from the model's logits as
        `train` does.

        Padding, with id 0 to the right, is computed as any token: what overflows there reaches the weights' gradients.
        """
        batch = pad_batch([self.sequences[row] for row in rows], vocab_size=self.vocab_size)
        device = model.device
        num_rows, width = batch.input_ids_BS.shape
        advice = "lower --batch-tokens, or --max-new-tokens where one response does not fit"
        with memory_errors_named(f"computing {num_rows} sequences of up to {width} tokens", advice):
            logits_BSV = model(input_ids=batch.input_ids_BS.to(device), use_cache=False).logits
            logits_TV = logits_BSV[batch.rows_T.to(device), batch.positions_T.to(device)].float() / self.temperature
            return torch.log_softmax(logits_TV, dim=-1).gather(-1, batch.targets_T.to(device)[:, None]).squeeze(-1)
