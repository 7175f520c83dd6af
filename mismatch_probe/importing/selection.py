"""What a log holds, and which of its responses the statistics are computed from."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import LoggedResponse

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Choice:
    """The prompts, and the share of their responses: below 1 where those to a single one are too many."""

    prompt_ids: frozenset[str]
    share: float = 1.0

    def takes(self, where: str) -> bool:
        """Whether a response to one of the prompts is chosen, by where it was read from."""
        return self.share >= 1 or _number(where) < self.share


def chosen_prompts(tokens_of: Mapping[str, int], cluster_of: Callable[[str], str], most_tokens: int) -> Choice:
    """Prompts whose responses together have at most `most_tokens` sampled tokens, or about as many of one cluster.

    tokens_of: by prompt. The choice depends on names alone, so it is the same each time, and it knows nothing of the
    numbers. Whole clusters are chosen because their responses are not independent.
    """
    clusters: dict[str, int] = defaultdict(int)
    for prompt_id, num_tokens in tokens_of.items():
        clusters[cluster_of(prompt_id)] += num_tokens
    chosen: set[str] = set()
    remainder = most_tokens
    for cluster in sorted(clusters, key=_number):
        if chosen and clusters[cluster] > remainder:
            break
        chosen.add(cluster)
        remainder -= clusters[cluster]
    prompt_ids = frozenset(prompt_id for prompt_id in tokens_of if cluster_of(prompt_id) in chosen)
    return Choice(prompt_ids, 1.0 if remainder >= 0 else most_tokens / (most_tokens - remainder))


def _number(name: str) -> float:
    """From 0 to 1, by chance of the name."""
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest) / 2.0 ** (8 * _DIGEST_BYTES)


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
    _cluster_parents: dict[str, str] = field(default_factory=dict)

    def add(self, response: LoggedResponse) -> str:
        """Count a response; returns the id of its prompt, which responses to the same token ids share."""
        prompt_id = _prompt_id(response)
        if response.group is not None:
            self._join(prompt_id, self._first_of_group.setdefault((response.step, response.group), prompt_id))
        num_sampled = int(response.sampled.sum())
        self.num_responses += 1
        self.num_tokens += response.token_ids.size
        self.num_sampled_tokens += num_sampled
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
        self.tokens_of[prompt_id] = self.tokens_of.get(prompt_id, 0) + num_sampled
        return prompt_id

    def cluster_of(self, prompt_id: str) -> str:
        """What the responses to a prompt are not independent of: itself, or the first of the prompts that share a group
        of a step with it, directly or through others, as the turns of a conversation do.
        """
        root = prompt_id
        while root in self._cluster_parents:
            root = self._cluster_parents[root]
        while prompt_id != root:
            self._cluster_parents[prompt_id], prompt_id = root, self._cluster_parents[prompt_id]
        return root

    def _join(self, prompt_id: str, first: str) -> None:
        child, parent = self.cluster_of(prompt_id), self.cluster_of(first)
        if child != parent:
            self._cluster_parents[child] = parent


def _prompt_id(response: LoggedResponse) -> str:
    key = hashlib.blake2b(np.asarray(response.prompt_token_ids, dtype="<i4").tobytes(), digest_size=8)
    return f"prompt-{key.hexdigest()}"


def of_step(rollouts: pa.Table, run: Path, step: int | None) -> pa.Table:
    """The responses of a step, of the only one where none is named.

    Raises:
        UsageError: there are several and none is named, or none of that number.
    """
    steps = sorted(pc.unique(rollouts["step"]).drop_null().to_pylist())
    if step is None:
        if len(steps) > 1:
            raise UsageError(
                f"{run} has responses of {len(steps)} steps ({steps[0]} to {steps[-1]}), and one checkpoint has the "
                "weights of one: give --step"
            )
        return rollouts
    if step not in steps:
        range_of_steps = f"{steps[0]} to {steps[-1]}" if steps else "not known"
        raise UsageError(f"{run} has no response of step {step}; its steps are {range_of_steps}: mend --step")
    return rollouts.filter(pc.equal(rollouts["step"], step)).combine_chunks()
