"""A real policy behind the engine's interface, computed by transformers, for tests that need no vLLM."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import Engine, HeldWeight
from mismatch_probe.engines.weight_digests import as_numbers, weight_digest
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ModelEngine(Engine):
    """`faults` may hold `ignores_weights`: it takes new weights and keeps the old ones.

    keeps: a piece of the names of weights that it never takes.
    """

    def __init__(self, folder: Path, *faults: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.faults = set(faults)
        self.perturbation = 0.0
        self.keeps = ""

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        return alike_together(requests, lambda one: len(one.prompt.token_ids), partial(self._sample, sampling))

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        return alike_together(sequences, lambda one: (len(one.prompt_token_ids), len(one.token_ids)), self._scored)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        raise NotImplementedError

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        if "ignores_weights" in self.faults:
            return
        own = dict(self.model.named_parameters())
        assert given.keys() == own.keys()
        with torch.no_grad():
            for name, tensor in given.items():
                if not self.keeps or self.keeps not in name:
                    own[name].copy_(tensor.float())
            if self.perturbation:
                layer = self.model.model.layers[0].mlp.down_proj.weight
                layer.mul_(1 + self.perturbation)

    def held_weights(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        own = dict(self.model.named_parameters())
        digests = as_numbers([weight_digest(tensor) for tensor in own.values()])
        made_of = {name: {name: 1} if name in names else {} for name in own}
        return [
            {
                name: HeldWeight(digest, own[name].numel(), made_of[name])
                for name, digest in zip(own, digests, strict=True)
            }
        ]

    def effective_settings(self) -> dict[str, Any]:
        return {"engine": "transformers"}

    def close(self) -> None:
        pass

    def _sample(self, sampling: SamplingSettings, requests: Sequence[SampleRequest]) -> list[SampledSequence]:
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        prompts = [list(request.prompt.token_ids) for request in requests]
        ids = torch.tensor(prompts)
        for _ in range(sampling.max_new_tokens):
            with torch.no_grad():
                probabilities = self.model(ids, logits_to_keep=1).logits[:, -1].float().softmax(-1)
            drawn = [
                torch.multinomial(row, 1, generator=generator)
                for row, generator in zip(probabilities, generators, strict=True)
            ]
            ids = torch.cat([ids, torch.stack(drawn)], dim=1)
        sequences = [
            TokenSequence(request.id, prompt, row[len(prompt) :])
            for request, prompt, row in zip(requests, prompts, ids.tolist(), strict=True)
        ]
        return [
            SampledSequence(sequence, scores, "length", ["?"] * len(sequence.token_ids))
            for sequence, scores in zip(sequences, self._scored(sequences), strict=True)
        ]

    def _scored(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids for sequence in sequences])
        with torch.no_grad():
            log_softmax = self.model(ids).logits.float().log_softmax(-1)
        first = len(sequences[0].prompt_token_ids)
        found = log_softmax[:, first - 1 : -1].gather(-1, ids[:, first:, None])[..., 0]
        return [ScoredSequence(one.id, np.asarray(row)) for one, row in zip(sequences, found.numpy(), strict=True)]


def alike_together(
    items: Sequence[Item], kind: Callable[[Item], Any], answer: Callable[[Sequence[Item]], list[Answer]]
) -> list[Answer]:
    """The answer to each item, in order; items of one kind are answered together."""
    found: dict[int, Answer] = {}
    rows = sorted(range(len(items)), key=lambda row: kind(items[row]))
    for _, group in groupby(rows, key=lambda row: kind(items[row])):
        chosen = list(group)
        found |= zip(chosen, answer([items[row] for row in chosen]), strict=True)
    return [found[row] for row in range(len(items))]
