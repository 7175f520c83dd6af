"""Responses sampled from mu with their rewards, and their micro-batches."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.config.train import RolloutSettings
from mismatch_probe.engines.base import Engine
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest, TokenSequence
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.tasks.reward_calls import SEQUENTIAL, RewardLimits
from mismatch_probe.tasks.rewards import Repeats, Reward, TextResponse, ask_again, judge_responses
from mismatch_probe.train.distributed import (
    as_first_rank_has_it,
    engine_share,
    gather,
    is_main,
    largest,
    rank,
    speaks_for_engine,
    world_size,
)
from mismatch_probe.training_path.batching import plan_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rollout:
    """One response: the log-probs of mu from decoding [T], nats, and the reward, NaN where it came too late."""

    sequence: TokenSequence
    mu_logprobs: Floats
    prompt_id: str
    reward: float
    truncated: bool
    text: str
    is_late: bool = False

    @property
    def length(self) -> int:
        return len(self.sequence.token_ids)


class Rollouts:
    """Samples the responses of each step; its problems and every seed follow from the step's number alone.

    `reward_seconds` is the time of the last rewards; `ends` are the tokens that end a response.
    """

    def __init__(
        self,
        engine: Engine,
        problems: Sequence[EncodedPrompt],
        tokenizer: "PreTrainedTokenizerBase",
        reward: Reward,
        settings: RolloutSettings,
        seed: int,
        ranks_an_engine: int = 1,
        limits: RewardLimits = SEQUENTIAL,
        ends: frozenset[int] = frozenset(),
        rewards_repeated: int = 4,
    ) -> None:
        self._rewards_repeated = rewards_repeated
        self.ends = ends
        self._by_id = {problem.prompt_id: problem for problem in problems}
        self.reward_seconds = 0.0
        self._limits = limits
        self._engine = engine
        self._ranks_an_engine = ranks_an_engine
        self._problems = problems
        self._tokenizer = tokenizer
        self._reward = reward
        self._settings = settings
        self._sampling = SamplingSettings(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
        self._seed = seed

    def restrict(self, problems: Sequence[EncodedPrompt]) -> None:
        """Sample only these problems from now on."""
        self._problems = problems

    def sample(self, step: int) -> list[Rollout]:
        """The step's responses, problem after problem, on every rank."""
        return self.respond(
            [
                [
                    SampleRequest(
                        f"{step}/{problem.prompt_id}/{sample}", problem, self._request_seed(step, place, sample)
                    )
                    for sample in range(self._settings.samples)
                ]
                for place, problem in self._problems_of_step(step)
            ]
        )

    def respond(self, groups: Sequence[Sequence[SampleRequest]]) -> list[Rollout]:
        """Responses to every group of requests, on every rank; each engine answers its share of the groups."""
        requests = [request for group in engine_share(groups, self._ranks_an_engine) for request in group]
        responses = self._engine.sample(requests, self._sampling)
        texts = self._tokenizer.batch_decode([item.sequence.token_ids for item in responses], skip_special_tokens=True)
        answers = [
            TextResponse(request.prompt, text, response.finish_reason == "length")
            for request, text, response in zip(requests, texts, responses, strict=True)
        ]
        start = time.perf_counter()
        judgement = judge_responses(self._reward, answers, self._limits)
        self.reward_seconds = time.perf_counter() - start
        rollouts = [
            Rollout(
                sequence=response.sequence,
                mu_logprobs=response.scores.logprobs.astype(np.float64),
                prompt_id=request.prompt.prompt_id,
                reward=float(reward),
                truncated=item.truncated,
                text=item.text,
                is_late=bool(is_late),
            )
            for response, request, reward, is_late, item in zip(
                responses, requests, judgement.rewards, judgement.is_late, answers, strict=True
            )
        ]
        return gather(rollouts if speaks_for_engine(self._ranks_an_engine) else [])

    def repeat_rewards(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Compute the rewards of a few responses again: the metrics of `Repeats`, equal on every rank."""
        if not is_main():
            return as_first_rank_has_it(Repeats().metrics())
        complete = [rollout for rollout in rollouts if not rollout.truncated and rollout.prompt_id in self._by_id]
        random = np.random.default_rng([self._seed, step])
        sample = [complete[row] for row in random.permutation(len(complete))[: self._rewards_repeated]]
        answers = [TextResponse(self._by_id[rollout.prompt_id], rollout.text, truncated=False) for rollout in sample]
        first = np.array([rollout.reward for rollout in sample])
        rewards = np.array([rollout.reward for rollout in complete if math.isfinite(rollout.reward)])
        spread = float(rewards.std()) if rewards.size else 0.0
        return as_first_rank_has_it(ask_again(self._reward, answers, first, spread, self._limits).metrics())

    def _problems_of_step(self, step: int) -> list[tuple[int, EncodedPrompt]]:
        """The next problems of a fresh shuffle for every pass over them, each with its place in the step."""
        size, total = self._settings.prompts, len(self._problems)
        problems = []
        for place in range(size):
            number = step * size + place
            order = np.random.default_rng([self._seed, number // total]).permutation(total)
            problems.append((place, self._problems[order[number % total]]))
        return problems

    def _request_seed(self, step: int, place: int, sample: int) -> int:
        return int(np.random.SeedSequence([self._seed, step, place, sample]).generate_state(1)[0])


@dataclass(frozen=True)
class MicroBatch:
    """The responses of one forward pass; a rank with fewer passes computes a filler, whose result is not used."""

    rows: list[int]
    is_filler: bool = False

    def of(self, rollouts: Sequence[Rollout]) -> list[TokenSequence]:
        return [rollouts[row].sequence for row in self.rows]


def micro_batches(rollouts: Sequence[Rollout], rows: Sequence[int], most_tokens: int) -> list[MicroBatch]:
    """This rank's share of `rows`; every rank has as many micro-batches, since each pass gathers weights from all."""
    own = list(rows)[rank() :: world_size()]
    lengths = [rollouts[row].sequence.num_tokens for row in own]
    fits_in_one = lengths and len(lengths) * max(lengths) <= most_tokens
    passes = [list(range(len(own)))] if fits_in_one else plan_batches(lengths, most_tokens)
    batches = [MicroBatch([own[index] for index in batch]) for batch in passes]
    return batches + [MicroBatch([0], is_filler=True)] * (int(largest(len(batches))) - len(batches))


def gathered_tokens(
    rollouts: Sequence[Rollout], batches: Sequence[MicroBatch], passes: Sequence[torch.Tensor]
) -> Floats:
    """Gather the values of each micro-batch of each rank: those of all response tokens [T], on every rank."""
    own: list[tuple[int, Floats]] = []
    for batch, values_T in zip(batches, passes, strict=True):
        ends = np.cumsum([rollouts[row].length for row in batch.rows])[:-1]
        if not batch.is_filler:
            own += zip(batch.rows, np.split(values_T.detach().double().cpu().numpy(), ends), strict=True)
    by_row = dict(gather(own))
    return np.concatenate([by_row[row] for row in range(len(rollouts))])
