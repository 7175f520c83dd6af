"""An engine against itself: what it says of the same tokens when something changes that should not matter."""

from collections.abc import Sequence

import numpy as np

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import Engine
from mismatch_probe.records.sequences import SampledSequence, SampleRequest, ScoredSequence, TokenSequence


def scored_alone(engine: Engine, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """Prefill scores of each sequence in a batch of its own; a leg computed among others is to be held against them."""
    return [engine.replay([sequence])[0] for sequence in sequences]


def decoded_alone(
    engine: Engine,
    requests: Sequence[SampleRequest],
    sampling: SamplingSettings,
    recorded: Sequence[TokenSequence],
) -> list[ScoredSequence]:
    """Decode scores of `recorded` responses whose requests are sampled again in batches of their own, with their seeds.

    NaN from the first token that comes out otherwise, or is not sampled within `sampling.max_new_tokens`.
    """
    common = []
    for request, before in zip(requests, recorded, strict=True):
        again = engine.sample([request], sampling)[0]
        common.append(_in_common(again, before))
    return common


def _in_common(again: SampledSequence, before: TokenSequence) -> ScoredSequence:
    shorter = min(len(again.sequence.token_ids), len(before.token_ids))
    differs = np.not_equal(again.sequence.token_ids[:shorter], before.token_ids[:shorter])
    length = int(differs.argmax()) if differs.any() else shorter
    logprobs = np.full(len(before.token_ids), np.nan, dtype=np.float32)
    logprobs[:length] = again.scores.logprobs[:length]
    return ScoredSequence(before.id, logprobs)
