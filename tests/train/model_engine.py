"""A real policy behind the engine's interface, computed by transformers, for tests that need no vLLM."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import Engine
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence


class ModelEngine(Engine):
    """`faults` may hold `ignores_weights`: it takes new weights and keeps the old ones."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.faults = set(faults)
        self.perturbation = 0.0

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        return [self._sample(request, sampling) for request in requests]

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        return [ScoredSequence(one.id, self._logprobs(one)) for one in sequences]

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
                own[name].copy_(tensor.float())
            if self.perturbation:
                layer = self.model.model.layers[0].mlp.down_proj.weight
                layer.mul_(1 + self.perturbation)

    def effective_settings(self) -> dict[str, Any]:
        return {"engine": "transformers"}

    def close(self) -> None:
        pass

    def _sample(self, request: SampleRequest, sampling: SamplingSettings) -> SampledSequence:
        generator = torch.Generator().manual_seed(request.seed)
        ids = list(request.prompt.token_ids)
        for _ in range(sampling.max_new_tokens):
            with torch.no_grad():
                probabilities = self.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        sequence = TokenSequence(request.id, list(request.prompt.token_ids), ids[len(request.prompt.token_ids) :])
        scores = ScoredSequence(request.id, self._logprobs(sequence))
        return SampledSequence(sequence, scores, "length", ["?"] * len(sequence.token_ids))

    def _logprobs(self, sequence: TokenSequence) -> FloatArray:
        ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        with torch.no_grad():
            log_softmax = self.model(ids).logits[0].log_softmax(-1)
        first = len(sequence.prompt_token_ids)
        found = log_softmax[first - 1 : -1].gather(-1, ids[0, first:, None]).flatten()
        return np.asarray(found.numpy())
