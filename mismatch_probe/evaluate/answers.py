"""From recorded responses to what they earned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mismatch_probe.errors import UsageError
from mismatch_probe.evaluate.estimates import Answers
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks.rewards import Answered, Reward, score_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        answered = [
            Answered(self._prompts[prompt_id], text, reason == "length")
            for prompt_id, text, reason in zip(prompt_ids, texts, rollouts["finish_reason"].to_pylist(), strict=True)
        ]
        rewards = score_responses(self._reward, answered)
        if not np.isfinite(rewards).all():
            row = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise UsageError(
                f"reward {self._reward.name} gave {rewards[row]} for a response to prompt {prompt_ids[row]}, which no "
                "average can hold; mend it"
            )
        lengths = np.array([len(ids) for ids in token_ids], dtype=np.int64)
        return Answers(
            rewards, lengths, np.array([self._numbers[prompt_id] for prompt_id in prompt_ids], dtype=np.int64)
        )
