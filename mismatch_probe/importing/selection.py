"""The contents of a log, and the choice of the responses that the statistics are computed from.

A log has the ids of a prompt's images, a placeholder for each of their patches, and no pixels.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.errors import UsageError
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count
from mismatch_probe.provenance.checkpoint import placeholder_ids
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.sequences import Ints, Mask

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class PromptChoice:
    """The chosen prompts, and the share of their responses: below 1 where one prompt alone has too many."""

    prompt_ids: frozenset[str]
    share: float = 1.0

    def takes(self, where: str) -> bool:
        """Whether a response to one of the prompts is chosen; `where` is its place in the log."""
        return self.share >= 1 or _hash_fraction(where) < self.share


def chosen_prompts(tokens_of: Mapping[str, int], cluster_of: Callable[[str], str], most_tokens: int) -> PromptChoice:
    """Choose prompts whose responses have at most `most_tokens` sampled tokens together, or as many of one cluster.

    `tokens_of` has the sampled tokens of each prompt. The choice depends on names alone, so it is the same each time
    and independent of the numbers. Whole clusters are chosen because their responses are not independent.
    """
    clusters: dict[str, int] = defaultdict(int)
    for prompt_id, num_tokens in tokens_of.items():
        clusters[cluster_of(prompt_id)] += num_tokens
    chosen_clusters: set[str] = set()
    remainder = most_tokens
    for cluster in sorted(clusters, key=_hash_fraction):
        if chosen_clusters and clusters[cluster] > remainder:
            break
        chosen_clusters.add(cluster)
        remainder -= clusters[cluster]
    prompt_ids = frozenset(prompt_id for prompt_id in tokens_of if cluster_of(prompt_id) in chosen_clusters)
    return PromptChoice(prompt_ids, 1.0 if remainder >= 0 else most_tokens / (most_tokens - remainder))


def _hash_fraction(name: str) -> float:
    """A number from 0 to 1 that is a hash of the name."""
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest) / 2.0 ** (8 * _DIGEST_BYTES)


@dataclass
class Census:
    """Sums over the responses of a log that were counted so far.

    A prompt's id is a hash of its token ids, so that the same prompt has the same id in every log.
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
    """The names that the log gives to its models."""
    temperatures: set[float] = field(default_factory=set)
    tokens_of: dict[str, int] = field(default_factory=dict)
    """The sampled tokens of each prompt."""
    _first_of_name: dict[tuple[int | None, str, str], str] = field(default_factory=dict)
    _cluster_parents: dict[str, str] = field(default_factory=dict)

    def add(self, response: LoggedResponse) -> str:
        """Count a response; returns the id of its prompt, which responses to the same token ids share."""
        prompt_id = _prompt_id_of(response)
        for kind, name in (("group", response.group), ("trajectory", response.trajectory)):
            if name is not None:
                first = self._first_of_name.setdefault((response.step, kind, name), prompt_id)
                self._join_clusters(prompt_id, first)
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
        """The cluster of the responses to a prompt, whose responses are not independent.

        It is the prompt itself, or the first that shares a group or a trajectory of a step with it, directly or through
        other prompts, as the turns of a conversation do.
        """
        root = prompt_id
        while root in self._cluster_parents:
            root = self._cluster_parents[root]
        while prompt_id != root:
            self._cluster_parents[prompt_id], prompt_id = root, self._cluster_parents[prompt_id]
        return root

    def _join_clusters(self, prompt_id: str, first: str) -> None:
        child, parent = self.cluster_of(prompt_id), self.cluster_of(first)
        if child != parent:
            self._cluster_parents[child] = parent


def _prompt_id_of(response: LoggedResponse) -> str:
    key = hashlib.blake2b(np.asarray(response.prompt_token_ids, dtype="<i4").tobytes(), digest_size=8)
    return f"prompt-{key.hexdigest()}"


def responses_of_step(rollouts: pa.Table, run: Path, step: int | None) -> pa.Table:
    """The responses of a step; of the only step where none is named.

    Raises:
        UsageError: there are several steps and none is named, or no step has that number.
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
        which = (
            "no step is recorded: leave --step out"
            if not steps
            else f"its only step is {steps[0]}: give --step {steps[0]}"
            if len(steps) == 1
            else f"its steps are {steps[0]} to {steps[-1]}: fix --step"
        )
        raise UsageError(f"{run} has no response of step {step}; {which}")
    return rollouts.filter(pc.equal(rollouts["step"], step)).combine_chunks()


def without_images(rollouts: pa.Table, config: Mapping[str, Any], run: Path) -> tuple[pa.Table, list[LogFinding]]:
    """The responses whose contexts hold no image, and the finding on the others; config: the checkpoint's. A
    placeholder that the policy sampled shows no image.

    Raises:
        UsageError: every response holds one.
    """
    ids = placeholder_ids(config)
    if not ids or not rollouts.num_rows:
        return rollouts, []
    counts = _count_of_rows(rollouts["prompt_token_ids"], ids)
    counts += _count_of_rows(rollouts["token_ids"], ids, ~pc.list_flatten(rollouts["sampled"]).to_numpy())
    is_text = counts == 0
    if is_text.all():
        return rollouts, []
    num_rows, num_tokens, names = int((~is_text).sum()), int(counts.sum()), " or ".join(map(str, ids))
    if not is_text.any():
        raise UsageError(
            f"every response of {run} holds placeholders of images ({write_count(num_tokens)} tokens, id {names}), "
            "and the log has no pixels: a checkpoint cannot compute what follows them; leave --model out"
        )
    finding = LogFinding.of(
        LogCode.IMAGES,
        evidence={"responses": num_rows, "tokens": num_tokens, "ids": ids},
        number=write_count(num_rows),
        total=write_count(rollouts.num_rows),
        count=write_count(num_tokens),
        id=names,
    )
    return rollouts.filter(pa.array(is_text)).combine_chunks(), [finding]


def _count_of_rows(column: pa.ChunkedArray, ids: list[int], counts: Mask | None = None) -> Ints:
    """How many of each row's values are among `ids` [N], of those that count [T]."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    is_one = np.isin(pc.list_flatten(column).to_numpy(), ids) & (True if counts is None else counts)
    rows = np.repeat(np.arange(lengths.size), lengths)
    return np.asarray(np.bincount(rows[is_one], minlength=lengths.size))
