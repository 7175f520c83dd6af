"""One pair of a run as a sample, two samples over shared prompts, and each side against itself in the other run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.config.comparison import PairName
from mismatch_probe.config.sides import response_of
from mismatch_probe.errors import UsageError
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import ids_key
from mismatch_probe.stats.sequences import Ints, Sequences, TokenPair

ResponseKey = int


def pair_text(name: PairName) -> str:
    """`bf16/fp16`: the training side and the inference side."""
    return "/".join(name)


@dataclass(frozen=True)
class Sample:
    """A pair's recorded data; `pair` of it is None when no response is usable."""

    name: PairName
    data: PairData

    @property
    def num_sampled(self) -> int:
        """Responses sampled, usable or not."""
        return int(self.data.rollouts.num_rows)

    @property
    def is_by_prefill(self) -> bool:
        """Whether mu's log-probs are those of a prefill, as in a run that scored given responses."""
        return self.data.legs["mu"].endswith("-prefill")

    @property
    def num_empty(self) -> int:
        """Responses without a token that was sampled."""
        rollouts = self.data.rollouts
        column = "sampled" if "sampled" in rollouts.column_names else "token_ids"
        return sum(not any(row) if column == "sampled" else not row for row in rollouts[column].to_pylist())

    @cached_property
    def responses(self) -> dict[str, ResponseKey]:
        """Of each usable response, by its id: the key of the prompt's and response's token ids."""
        columns = self.data.rollouts.select(["id", "prompt_token_ids", "token_ids"]).to_pydict()
        return {
            columns["id"][row]: ids_key(columns["prompt_token_ids"][row], columns["token_ids"][row])
            for row in self.data.rows
        }

    @cached_property
    def prompts(self) -> dict[str, ResponseKey]:
        """The key of each prompt's token ids, by its id; all prompts, whether their responses are usable or not."""
        columns = self.data.rollouts.select(["prompt_id", "prompt_token_ids"]).to_pydict()
        return {
            prompt_id: ids_key(token_ids, ())
            for prompt_id, token_ids in zip(columns["prompt_id"], columns["prompt_token_ids"], strict=True)
        }


def by_prefill(sample: Sample) -> Sample:
    """The sample with mu's log-probs from a prefill of the ids, as a rescored run has them.

    Raises:
        UsageError: no prefill was recorded.
    """
    pair, legs = sample.data.pair, sample.data.legs
    if pair is None or sample.is_by_prefill:
        return sample
    if pair.log_mu_prefill is None:
        raise UsageError(f"{pair_text(sample.name)} has no prefill; make it with engine.prefill = true")
    prefill_pair = replace(pair, log_mu=pair.log_mu_prefill, log_mu_prefill=None)
    return replace(sample, data=replace(sample.data, pair=prefill_pair, legs=legs | {"mu": legs["mu_prefill"]}))


@dataclass(frozen=True)
class Overlap:
    """How two samples meet: prompts in both, those of them with other token ids, responses in both, those the same."""

    prompts: int
    changed_prompts: int
    responses: int
    same_responses: int
    only_first: int
    only_second: int

    @property
    def is_paired(self) -> bool:
        """One sample holds the responses of the other, with the same token ids; it may have grown beyond them."""
        return 0 < self.responses == self.same_responses and min(self.only_first, self.only_second) == 0


@dataclass(frozen=True)
class Meeting:
    """Two token pairs whose clusters are numbered alike, and how they overlap."""

    first: TokenPair
    second: TokenPair
    overlap: Overlap


def read_samples(run: RunDirectory, manifest: Manifest) -> dict[PairName, Sample]:
    """Every pair of a run."""
    reader = RunReader(run, manifest)
    return {name: Sample(name, reader.pair(name)) for name in manifest.settings.pairs}


def meet(first: Sample, second: Sample) -> Meeting:
    """Number the clusters of two samples alike.

    Raises:
        ValueError: one of them has no usable response.
    """
    if first.data.pair is None or second.data.pair is None:
        raise ValueError("a sample without a usable response cannot be compared")
    old, new = first.data.cluster_names, second.data.cluster_names
    names = np.union1d(old, new)
    return Meeting(
        first=_renumber(first.data.pair, np.searchsorted(names, old)),
        second=_renumber(second.data.pair, np.searchsorted(names, new)),
        overlap=_overlap(first, second),
    )


def _renumber(pair: TokenPair, clusters: Ints) -> TokenPair:
    return replace(pair, sequences=replace(pair.sequences, clusters=clusters))


def _overlap(first: Sample, second: Sample) -> Overlap:
    prompts = first.prompts.keys() & second.prompts.keys()
    old, new = _without_sampler(first.responses), _without_sampler(second.responses)
    responses = old.keys() & new.keys()
    return Overlap(
        prompts=len(prompts),
        changed_prompts=sum(first.prompts[prompt] != second.prompts[prompt] for prompt in prompts),
        responses=len(responses),
        same_responses=sum(old[response] == new[response] for response in responses),
        only_first=len(old) - len(responses),
        only_second=len(new) - len(responses),
    )


def _without_sampler(responses: dict[str, ResponseKey]) -> dict[str, ResponseKey]:
    """By prompt and number of the sample, so that engines of different dtypes can be set side by side."""
    return {response_of(response): key for response, key in responses.items()}


def side_against_itself(first: Sample, second: Sample) -> dict[str, TokenPair]:
    """By side (`pi`, `mu`): its log-probs in the second run as log_pi, those in the first as log_mu.

    Empty where no response has the same ids in both. Both samples have a usable response.
    """
    old, new = first.data.pair, second.data.pair
    assert old is not None
    assert new is not None
    places = {response: place for place, response in enumerate(second.responses)}
    same = [
        (place, places[response])
        for place, (response, key) in enumerate(first.responses.items())
        if second.responses.get(response) == key
        and first.data.is_complete(place)
        and second.data.is_complete(places[response])
    ]
    if not same:
        return {}
    numbers, other_numbers = map(list, zip(*same, strict=True))
    old_tokens, new_tokens = _tokens(old.sequences, numbers), _tokens(new.sequences, other_numbers)
    sequences = Sequences.of_lengths(old.sequences.lengths[numbers], old.sequences.clusters[numbers])
    return {
        "pi": TokenPair(sequences, log_pi=new.log_pi[new_tokens], log_mu=old.log_pi[old_tokens]),
        "mu": TokenPair(sequences, log_pi=new.log_mu[new_tokens], log_mu=old.log_mu[old_tokens]),
    }


def _tokens(sequences: Sequences, numbers: Sequence[int]) -> Ints:
    return np.concatenate([np.arange(*sequences.offsets[place : place + 2]) for place in numbers])
