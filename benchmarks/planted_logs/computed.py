"""Faults that the model computes itself: a state read from its neighbour, a window, a noisy engine, other weights.

Written from the issue and the documents alone, before the detectors were read. The faulty side's log-probs are those of
a forward pass with the fault in it, and a faulty sampler's tokens are drawn from them: nothing is added to log-probs.
mu decodes with a key-value cache in BF16, pi scores in one pass in BF16.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.planted_logs.base import Log, Response

Random = np.random.Generator


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a forward pass at absolute places; the default does nothing."""

    block: int = 0
    phase: int = 0
    """The states at places congruent to it modulo `block` are mixed with those of the place before."""
    first: int | None = None
    """The states from this place on are mixed so."""
    mixed: float = 0.0
    window: int = 0
    """Keys so far away, or further, count less."""
    less: float = 0.0
    """By how much in nats, before the softmax."""
    noise: float = 0.0
    """Of each number of the last state, relative."""

    def hits(self, places: torch.Tensor) -> torch.Tensor:
        hit = torch.zeros_like(places, dtype=torch.bool)
        if self.block:
            hit |= places % self.block == self.phase
        if self.first is not None:
            hit |= places >= self.first
        return hit

    def bias(self, queries: torch.Tensor, num_keys: int) -> torch.Tensor:
        """[1, 1, Q, K], to be added to attention logits."""
        keys = torch.arange(num_keys)
        distance = queries[:, None] - keys[None, :]
        bias = torch.zeros(distance.shape)
        if self.window:
            bias[distance >= self.window] = -self.less
        bias[distance < 0] = -torch.inf
        return bias[None, None]


SOUND = Fault()


@contextmanager
def faulty(model: Any, fault: Fault, generator: torch.Generator) -> Iterator[Any]:
    """`forward(ids [B, Q], first place, cache)` gives logits [B, Q, V] and the cache, with the fault in it."""
    before: dict[str, torch.Tensor] = {}
    places = torch.zeros(0, dtype=torch.long)

    def change(module: Any, inputs: Any, states: torch.Tensor) -> torch.Tensor:
        own = states
        if fault.mixed:
            last = before.get("state", torch.zeros_like(states[:, :1]))
            previous = torch.cat([last, states[:, :-1]], 1)
            before["state"] = states[:, -1:].clone()
            moved = (1 - fault.mixed) * states + fault.mixed * previous
            states = torch.where(fault.hits(places)[None, :, None], moved, states)
        if fault.noise:
            wild = torch.randn(states.shape, generator=generator)
            states = states * (1 + fault.noise * wild)
        return states.to(own.dtype)

    @torch.inference_mode()
    def forward(ids: torch.Tensor, start: int, cache: Any = None) -> tuple[torch.Tensor, Any]:
        nonlocal places
        places = torch.arange(start, start + ids.shape[1])
        mask = fault.bias(places, start + ids.shape[1]).expand(len(ids), -1, -1, -1).to(model.dtype)
        answer = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        return answer.logits.float(), answer.past_key_values

    hook = model.model.norm.register_forward_hook(change)
    try:
        yield forward
    finally:
        hook.remove()


def sampled(
    model: Any, prompts: Sequence[list[int]], tokens: int, fault: Fault, seed: int, *, end: int | None = None
) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, ids and log-probs of one response a prompt; prompts of a length are one batch."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in sorted({len(prompt) for prompt in prompts}):
        alike = [prompt for prompt in prompts if len(prompt) == length]
        with faulty(model, fault, generator) as forward:
            logits, cache = forward(torch.tensor(alike), 0)
            ids, mu = [], []
            for place in range(length, length + tokens):
                log_probs = torch.log_softmax(logits[:, -1], -1)
                token = torch.multinomial(log_probs.exp(), 1, generator=generator)
                ids.append(token)
                mu.append(log_probs.gather(1, token))
                logits, cache = forward(token, place, cache)
        rows, values = torch.cat(ids, 1).tolist(), torch.cat(mu, 1).tolist()
        for prompt, row, value in zip(alike, rows, values, strict=True):
            size = row.index(end) + 1 if end in row else len(row)
            made.append((prompt, row[:size], value[:size]))
    return made


def scored(model: Any, prompt: list[int], ids: list[int], fault: Fault, seed: int = 0) -> np.ndarray:
    with faulty(model, fault, torch.Generator().manual_seed(seed)) as forward:
        logits, _ = forward(torch.tensor([prompt + ids]), 0)
    log_probs = torch.log_softmax(logits[0, len(prompt) - 1 : -1], -1)
    return log_probs.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy().astype(float)


def log_of(
    model: Any, prompts: Sequence[list[int]], tokens: int, mu: Fault, pi: Fault, seed: int, end: int | None = None
) -> Log:
    """Responses that one fault's engine samples and another's trainer scores."""
    return [
        Response(prompt, ids, np.array(values), scored(model, prompt, ids, pi, seed + number + 1))
        for number, (prompt, ids, values) in enumerate(sampled(model, prompts, tokens, mu, seed, end=end))
    ]


# Weights that change in flight


def updated(model: Any, source: Any, size: float, seed: int) -> None:
    """The weights of `source`, each matrix moved by a product of rank 4, as a few steps of training move them."""
    generator = torch.Generator().manual_seed(seed)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        if theirs.ndim < 2 or theirs.shape == source.get_input_embeddings().weight.shape:
            mine.data = theirs.data.clone()
            continue
        rows, columns = theirs.shape
        outputs = torch.randn(rows, 4, generator=generator)
        inputs = torch.randn(4, columns, generator=generator)
        step = outputs @ inputs / 2
        mine.data = (theirs.data.float() + size * theirs.data.float().std() * step).to(theirs.dtype)


def moved_to(model: Any, source: Any, log: Log, aim: float, seed: int) -> float:
    """An update after which log-probs of these responses are moved by `aim` nats rms; the size that was taken."""
    low, high = 1e-4, 1.0
    before = [scored(source, response.prompt, response.ids, SOUND) for response in log]
    for _ in range(9):
        size = float(np.sqrt(low * high))
        updated(model, source, size, seed)
        after = [scored(model, response.prompt, response.ids, SOUND) for response in log]
        reached = float(np.sqrt(np.mean((np.concatenate(after) - np.concatenate(before)) ** 2)))
        low, high = (size, high) if reached < aim else (low, size)
    return size


@torch.inference_mode()
def in_flight(
    old: Any, new: Any, prompts: Sequence[list[int]], ats: Sequence[int], tokens: int, seed: int, *, keeps_cache: bool
) -> Log:
    """Responses begun by the old weights and ended by the new ones from place `at` of the response on; 0: all new.
    They are in the order of their prompts' length and of the place.

    keeps_cache: the keys and values of the old weights stay, as where an engine does not prefill again.
    """
    generator = torch.Generator().manual_seed(seed)
    made: Log = []
    for prompt_length, at in sorted({(len(prompt), at) for prompt, at in zip(prompts, ats, strict=True)}):
        alike = [p for p, a in zip(prompts, ats, strict=True) if (len(p), a) == (prompt_length, at)]
        batch = torch.tensor(alike)
        answer = (old if at else new)(batch, use_cache=True)
        ids, mu = batch, []
        for place in range(tokens):
            log_probs = torch.log_softmax(answer.logits[:, -1].float(), -1)
            if place == at and at:
                cache = answer.past_key_values
                if keeps_cache:
                    cache.crop(ids.shape[1] - 1)
                    answer = new(ids[:, -1:], past_key_values=cache, use_cache=True)
                else:
                    answer = new(ids, use_cache=True)
                log_probs = torch.log_softmax(answer.logits[:, -1].float(), -1)
            token = torch.multinomial(log_probs.exp(), 1, generator=generator)
            mu.append(log_probs.gather(1, token))
            ids = torch.cat([ids, token], 1)
            weights = old if place < at else new
            answer = weights(token, past_key_values=answer.past_key_values, use_cache=True)
        for prompt, row, values in zip(alike, ids[:, prompt_length:].tolist(), torch.cat(mu, 1).tolist(), strict=True):
            made.append(Response(prompt, row, np.array(values), scored(new, prompt, row, SOUND)))
    return made
