"""Logs of tiny models: responses that the training path samples, log-probs that it computes, faults and all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.config.model import ExplainSettings, ModelSettings, SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import EncodedPrompt, FloatArray, LoggedResponse, TokenSequence
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.generation import Sampler

BOS = 257


def sampled(
    checkpoint: Path, *, num_prompts: int = 6, samples: int = 8, num_tokens: int = 32, seed: int = 0, **sampling: Any
) -> list[TokenSequence]:
    """Responses of the checkpoint in FP32 to random prompts of several lengths, each begun by BOS, none ended early."""
    random = np.random.default_rng(seed)
    prompts = [
        prompt
        for number in range(num_prompts)
        for prompt in [EncodedPrompt(str(number), [BOS, *random.integers(0, 256, 6 + 3 * number).tolist()], "")]
        * samples
    ]
    settings = SamplingSettings(max_new_tokens=num_tokens, **sampling)
    with Sampler(checkpoint, Dtype.FP32, TrainingPathSettings(), settings) as sampler:
        found = sampler.sample(prompts, None, seed)
    return [
        TokenSequence(f"line {number + 1}", prompt.token_ids, one.token_ids)
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True))
        if one.finish_reason == "length"
    ]


def scored(
    checkpoint: Path,
    sequences: Sequence[TokenSequence],
    dtype: Dtype = Dtype.BF16,
    temperature: float = 1.0,
    **settings: Any,
) -> list[FloatArray]:
    """Log-probs by the training path in a format, computed once."""
    ids = tuple((tuple(one.prompt_token_ids), tuple(one.token_ids)) for one in sequences)
    key = (checkpoint, dtype, temperature, tuple(sorted(settings.items())), ids)
    if key not in _columns:
        with Scorer.load(checkpoint, dtype, TrainingPathSettings(**settings), temperature=temperature) as scorer:
            _columns[key] = [one.logprobs.astype(np.float64) for one in scorer.score_batch(list(sequences))]
    return [column.copy() for column in _columns[key]]


_columns: dict[tuple[object, ...], list[FloatArray]] = {}


def logged(
    sequences: Sequence[TokenSequence],
    mu: Sequence[FloatArray] | None = None,
    pi: Sequence[FloatArray] | None = None,
    **others: Any,
) -> list[LoggedResponse]:
    """The log's lines."""
    return [
        LoggedResponse(
            where=one.id,
            prompt_token_ids=np.array(one.prompt_token_ids, dtype=np.int32),
            token_ids=np.array(one.token_ids, dtype=np.int32),
            sampled=np.ones(len(one.token_ids), dtype=np.bool_),
            log_mu=None if mu is None else mu[number],
            log_pi=None if pi is None else pi[number],
            **others,
        )
        for number, one in enumerate(sequences)
    ]


def settings(checkpoint: Path, **others: Any) -> ExplainSettings:
    return ExplainSettings(model=ModelSettings(path=str(checkpoint)), **others)
