"""What a log holds, counted while it is read."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.records.sequences import LoggedResponse


@dataclass
class Census:
    """Sums over the responses seen so far. tokens_of: sampled tokens by prompt. models: as the log names them.

    Prompts are named by their token ids, so that the same one has the same name in every log.
    """

    num_responses: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    longest_response: int = 0
    has_mu: bool = False
    has_pi: bool = False
    has_ref: bool = False
    steps: set[int] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    tokens_of: dict[str, int] = field(default_factory=dict)
    _first_of_group: dict[tuple[int | None, str], str] = field(default_factory=dict)
    _joined_to: dict[str, str] = field(default_factory=dict)

    def add(self, response: LoggedResponse) -> str:
        """Count a response; returns the id of its prompt, which responses to the same token ids share."""
        prompt_id = _prompt_id(response)
        if response.group is not None:
            self._join(prompt_id, self._first_of_group.setdefault((response.step, response.group), prompt_id))
        sampled = int(response.sampled.sum())
        self.num_responses += 1
        self.num_tokens += response.token_ids.size
        self.num_sampled_tokens += sampled
        self.longest_response = max(self.longest_response, response.token_ids.size)
        self.has_mu |= response.log_mu is not None
        self.has_pi |= response.log_pi is not None
        self.has_ref |= response.log_ref is not None
        if response.step is not None:
            self.steps.add(response.step)
        if response.model is not None:
            self.models.add(response.model)
        if response.temperature is not None:
            self.temperatures.add(response.temperature)
        self.tokens_of[prompt_id] = self.tokens_of.get(prompt_id, 0) + sampled
        return prompt_id

    def cluster_of(self, prompt_id: str) -> str:
        """What the responses to a prompt are not independent of: itself, or the first of the prompts that share a group
        of a step with it, directly or through others, as the turns of a conversation do.
        """
        root = prompt_id
        while root in self._joined_to:
            root = self._joined_to[root]
        while prompt_id != root:
            self._joined_to[prompt_id], prompt_id = root, self._joined_to[prompt_id]
        return root

    def _join(self, prompt_id: str, first: str) -> None:
        later, earlier = self.cluster_of(prompt_id), self.cluster_of(first)
        if later != earlier:
            self._joined_to[later] = earlier


def _prompt_id(response: LoggedResponse) -> str:
    key = hashlib.blake2b(np.asarray(response.prompt_token_ids, dtype="<i4").tobytes(), digest_size=8)
    return f"prompt-{key.hexdigest()}"
