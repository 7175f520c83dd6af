"""A language model's worth of contexts under two policies, with the faults that the signatures are to find."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair
from mismatch_probe.verdict.departures import rounding_floor
from mismatch_probe.verdict.signatures.profile import Disagreement

NOISE_PER_ULP = 4.0
"""Logit errors of a right side in units of its format's roundoff, about what small models show."""


@dataclass(frozen=True)
class World:
    """Exact logits [T, V] of every context, laid out as responses behind prompts of the given lengths."""

    sequences: Sequences
    prompt_lengths: Ints
    logits: Floats
    generator: np.random.Generator

    @property
    def places(self) -> Floats:
        return np.asarray(self.sequences.positions + 1.0 + self.sequences.spread(self.prompt_lengths), dtype=np.float64)


def world(
    num_sequences: int = 40, num_tokens: int = 80, *, prompt: int = 0, spread: float = 2.0, seed: int = 0
) -> World:
    """Responses of varied lengths over 50 tokens; `spread` is the standard deviation of the logits."""
    generator = np.random.default_rng(seed)
    sequences = Sequences.of_lengths(generator.integers(num_tokens // 2, num_tokens + 1, num_sequences))
    scale = generator.uniform(0.2, 2, (sequences.num_tokens, 1)) * spread
    logits = generator.normal(size=(sequences.num_tokens, 50)) * scale
    return World(sequences, np.full(num_sequences, prompt), logits, generator)


def noisy(given: World, dtype: Dtype, logits: Floats | None = None) -> Floats:
    """Logits as an implementation in `dtype` computes them."""
    exact = given.logits if logits is None else logits
    size = 1e-6 if dtype == "fp32" else NOISE_PER_ULP * dtype.round_off
    return np.asarray(exact + given.generator.normal(size=exact.shape) * size, dtype=np.float64)


def pair_of(given: World, logits_pi: Floats, logits_mu: Floats, *, kept: Floats | None = None) -> TokenPair:
    """Tokens sampled from mu, with what the legs would record. `kept` [T, V] masks mu's support before sampling."""
    log_pi, log_ref = log_softmax(logits_pi), log_softmax(given.logits)
    log_mu = log_softmax(logits_mu if kept is None else np.where(kept > 0, logits_mu, -np.inf))
    gumbel = given.generator.gumbel(size=log_mu.shape)
    tokens = (log_mu + gumbel).argmax(axis=1)
    rows = np.arange(tokens.size)
    return TokenPair(
        given.sequences,
        log_pi=log_pi[rows, tokens].astype(np.float32),
        log_mu=log_mu[rows, tokens].astype(np.float32),
        log_ref=log_ref[rows, tokens].astype(np.float32),
        top1_pi=log_pi.argmax(axis=1),
        top1_mu=log_mu.argmax(axis=1),
        entropy_pi=-(np.exp(log_pi) * log_pi).sum(axis=1),
    )


def disagreement(given: World, pair: TokenPair, dtype: Dtype = Dtype.FP32, **known: Any) -> Disagreement:
    """The pair as `compare` hands it to the signatures; FP32 pairs that disagree are settled."""
    is_settled = known.pop("is_settled", dtype == "fp32")
    return Disagreement(
        pair,
        dtype,
        dtype,
        floor=rounding_floor(pair, dtype, dtype),
        is_settled=is_settled,
        prompt_lengths=given.prompt_lengths,
        **known,
    )


def clean(given: World, dtype: Dtype = Dtype.FP32) -> Disagreement:
    """Two right implementations."""
    return disagreement(given, pair_of(given, noisy(given, dtype), noisy(given, dtype)), dtype, is_settled=False)


def with_logits(
    given: World, dtype: Dtype = Dtype.FP32, *, pi: Floats | None = None, mu: Floats | None = None
) -> Disagreement:
    """A pair whose sides compute other logits than the exact ones."""
    return disagreement(given, pair_of(given, noisy(given, dtype, pi), noisy(given, dtype, mu)), dtype)


def with_pair(deviations: Disagreement, **changes: Any) -> Disagreement:
    """The same with other recorded columns."""
    return replace(deviations, pair=replace(deviations.pair, **changes))


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), dtype=np.float64)


def of_texts(log_mu: Floats, diff: Floats) -> Disagreement:
    """24 responses of 120 tokens behind prompts of 30 to 53, with these log-probs of the engine and these d."""
    sequences = Sequences.of_lengths(np.full(24, 120))
    pair = TokenPair(sequences, log_pi=np.minimum(log_mu + diff, -1e-9), log_mu=log_mu)
    return Disagreement(pair, Dtype.BF16, Dtype.BF16, floor=1e-6, prompt_lengths=30 + np.arange(24))


def texts(seed: int) -> tuple[np.random.Generator, Floats, Floats]:
    """Places in the context, and log-probs of tokens of which the engine is sure but for one in ten."""
    random = np.random.default_rng(seed)
    places = (30 + np.arange(24)[:, None] + np.arange(120)).ravel().astype(np.float64)
    return random, places, -np.where(random.random(2880) < 0.1, 0.7, 1e-3) * random.gamma(1.0, 1.0, 2880) - 1e-6
