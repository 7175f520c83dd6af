"""What responses earned, and accuracies with intervals clustered by problem.

Rewards r of responses x of mu estimate accuracy under pi by E_pi[r] = E_mu[w r] with w = pi(x)/mu(x), normalised by the
weights' own sum [Owen 2013, Monte Carlo theory, methods and examples, section 9.2]. Both accuracies come from the same
responses, so what is common to them cancels in their difference.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mismatch_probe.compare.plan import AnyEvent, fixed_batches, parse, run_batches
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.errors import UsageError
from mismatch_probe.notation import write_percent
from mismatch_probe.provenance.environment import sequence_seed
from mismatch_probe.records.answers import EvaluationDirectory
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.records.tables import ROLLOUTS, write_table
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, interval, jackknife, ratio, share_interval
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Ints, Sequences
from mismatch_probe.stats.tails import relative_excess
from mismatch_probe.tasks.rewards import Reward, TextResponse, score_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mismatch_probe.training_path.generation import Sampler


ENOUGH_ESS: Final = 0.5
"""Least effective share of the responses from which accuracy under pi is estimated."""


@dataclass(frozen=True)
class Answers:
    """Responses: what each earned [N], its tokens [N], and the number of the problem it answers [N]."""

    rewards: Floats
    lengths: Ints
    problems: Ints

    def at(self, rows: Ints) -> "Answers":
        """Some of the responses, by row."""
        return Answers(self.rewards[rows], self.lengths[rows], self.problems[rows])

    def estimator(self, level: float) -> Estimator:
        return Estimator(Sequences.of_lengths(self.lengths, self.problems), level)


@dataclass(frozen=True)
class ReweightedAccuracy:
    """What responses of mu say about pi; `undecided` says why not where they do not."""

    ess: Estimate | None
    under_pi: Estimate | None
    gap: Estimate | None
    undecided: str | None


def accuracy(answers: Answers, level: float) -> Estimate:
    """Mean reward; of rewards that are all 0 or 1 the share, whose interval stays within them."""
    estimator = answers.estimator(level)
    if _is_binary(answers.rewards):
        return estimator.share(answers.rewards > 0, "sequence")
    estimate = estimator.mean(answers.rewards, "sequence")
    assert estimate is not None, "rewards are finite"
    return estimate


def reweight(answers: Answers, log_ratio: Floats, level: float) -> ReweightedAccuracy:
    """Accuracy under pi from responses of mu, and how it differs; log_ratio: sum of log pi - log mu of each [N], nats.

    The gap has no interval where all responses earned the same: they cannot show one.
    """
    estimator = answers.estimator(level)
    excess = relative_excess(log_ratio)
    ess = estimator.effective_share(log_ratio, "sequence")
    if ess is None or ess.value < ENOUGH_ESS:
        share = "nothing" if ess is None else write_percent(ess.value)
        return ReweightedAccuracy(
            ess, None, None, f"weights pi/mu leave {share} of the responses, fewer than {write_percent(ENOUGH_ESS)}"
        )
    weights, rewards = 1 + excess, answers.rewards
    weighted_rewards, total = estimator.totals(weights * rewards, "sequence"), estimator.totals(weights, "sequence")
    plain, count = estimator.totals(rewards, "sequence"), estimator.counts("sequence")
    under_pi = jackknife(ratio, np.stack([weighted_rewards, total]), count)
    assert under_pi is not None, "weights are positive"
    if _is_binary(rewards):
        effective = max(1, round(ess.value * rewards.size))
        estimate = estimator.present(share_interval(under_pi, effective, level), "sequence")
    else:
        estimate = estimator.present(interval(under_pi, Scale.SIGNED, level), "sequence")
    if np.ptp(rewards) == 0:
        return ReweightedAccuracy(ess, estimate, estimator.bare(0.0, "sequence"), None)
    gap = estimator.smooth(_difference_of_ratios, [weighted_rewards, total, plain, count], "sequence")
    return ReweightedAccuracy(ess, estimate, gap, None)


def accuracy_difference(first: Answers, second: Answers, level: float) -> Estimate:
    """Accuracy of the first less that of the second, which answer the same problems, in pairs by problem.

    Raises:
        ValueError: they answer different problems.
    """
    if set(first.problems) != set(second.problems):
        raise ValueError("the two sets of responses answer different problems, which cannot be set against each other")
    columns: list[Floats] = []
    for answers in (first, second):
        estimator = answers.estimator(level)
        columns += [estimator.totals(answers.rewards, "sequence"), estimator.counts("sequence")]
    both = _join([first, second]).estimator(level)
    if np.ptp(np.concatenate([first.rewards, second.rewards])) == 0:
        return both.bare(0.0, "sequence")
    estimate = both.smooth(_difference_of_ratios, columns, "sequence")
    assert estimate is not None, "every problem has responses"
    return estimate


def _difference_of_ratios(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    return a / b - c / d


def _join(parts: Sequence[Answers]) -> Answers:
    return Answers(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("rewards", "lengths", "problems"))
    )


def _is_binary(rewards: Floats) -> bool:
    return bool(np.isin(rewards, (0.0, 1.0)).all())


class Marker:
    """Marks responses to the run's prompts; problems are numbered in the prompts' order."""

    def __init__(self, prompts: Sequence[EncodedPrompt], tokenizer: "PreTrainedTokenizerBase", reward: Reward) -> None:
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._numbers = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
        self._tokenizer = tokenizer
        self._reward = reward

    def mark(self, rollouts: pa.Table) -> Answers:
        """What the responses of a table of rollouts earned, row for row; a truncated one earns 0.

        Raises:
            UsageError: the reward failed, or gave something that is not finite.
        """
        token_ids = rollouts["token_ids"].to_pylist()
        prompt_ids = rollouts["prompt_id"].to_pylist()
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        text_responses = [
            TextResponse(self._prompts[prompt_id], text, reason == "length")
            for prompt_id, text, reason in zip(prompt_ids, texts, rollouts["finish_reason"].to_pylist(), strict=True)
        ]
        rewards = score_responses(self._reward, text_responses)
        if not np.isfinite(rewards).all():
            row = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise UsageError(
                f"reward {self._reward.name} gave {rewards[row]} for a response to prompt {prompt_ids[row]}, which no "
                "average can hold; fix it"
            )
        lengths = np.array([len(ids) for ids in token_ids], dtype=np.int64)
        return Answers(
            rewards, lengths, np.array([self._numbers[prompt_id] for prompt_id in prompt_ids], dtype=np.int64)
        )


def sample_training_path(
    run: EvaluationDirectory,
    manifest: Manifest,
    prompts: Sequence[EncodedPrompt],
    tokenizer: "PreTrainedTokenizerBase",
    listener: Callable[[AnyEvent], None],
) -> None:
    """As many responses from pi in each training dtype as an engine gave, unless they are there already."""
    for pi in sides_still_to_sample(run):
        _sample(run, manifest, prompts, tokenizer, pi, listener)


def sides_still_to_sample(run: EvaluationDirectory) -> list[Side]:
    """Training sides without all of their own responses. Raises BrokenRecord where the manifest cannot be read."""
    return [pi for pi in run.read_manifest().settings.train_sides if not run.pi_rollouts_path(pi).exists()]


def _sample(
    run: EvaluationDirectory,
    manifest: Manifest,
    prompts: Sequence[EncodedPrompt],
    tokenizer: "PreTrainedTokenizerBase",
    pi: Side,
    listener: Callable[[AnyEvent], None],
) -> None:
    from mismatch_probe.training_path.generation import Sampler

    settings = manifest.settings
    rows = [(prompt, sample) for prompt in prompts for sample in range(settings.sampling.samples_per_prompt)]
    assert settings.engine.batch_sequences is not None, "resolved when the run was made"
    size = settings.engine.batch_sequences
    batches = fixed_batches(len(rows), size)
    assert pi.training is not None
    stage, training = pi.stage("sample"), pi.training
    parts = run.parts(stage, ("rollouts",))
    with ExitStack() as stack:

        @cache
        def load() -> Sampler:
            folder, trust = manifest.identity_of(pi).folder, pi.model.trust_remote_code
            return stack.enter_context(Sampler(folder, pi.dtype, training, settings.sampling, trust_remote_code=trust))

        def work(numbers: list[int]) -> tuple[dict[str, pa.Table], int]:
            seed = sequence_seed(settings.sampling.seed, stage, numbers[0] // size)
            table = _batch(load(), [rows[number] for number in numbers], tokenizer, pi, seed)
            return {"rollouts": table}, pa.compute.sum(pa.compute.list_value_length(table["token_ids"])).as_py()

        run_batches(parts, stage, batches, work, lambda message: listener(parse(message)))
    write_table(run.pi_rollouts_path(pi), parts.read(len(batches), "rollouts").combine_chunks())
    parts.remove()


def _batch(
    sampler: "Sampler",
    rows: Sequence[tuple[EncodedPrompt, int]],
    tokenizer: "PreTrainedTokenizerBase",
    pi: Side,
    seed: int,
) -> pa.Table:
    prompts = [prompt for prompt, _ in rows]
    end: int | None = tokenizer.eos_token_id
    responses = sampler.sample(prompts, end, seed)
    texts = TokenTexts(tokenizer)
    return pa.table(
        {
            "id": [pi.row_id(prompt.prompt_id, sample) for prompt, sample in rows],
            "prompt_id": [prompt.prompt_id for prompt in prompts],
            "sampler": [pi.sampler] * len(rows),
            "seed": [seed] * len(rows),
            "prompt_token_ids": [prompt.token_ids for prompt in prompts],
            "token_ids": [response.token_ids for response in responses],
            "token_texts": [texts(response.token_ids) for response in responses],
            "finish_reason": [response.finish_reason for response in responses],
        },
        schema=ROLLOUTS,
    )
