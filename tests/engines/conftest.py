"""Engines started in the test process: short to start again, and the traces they leave are removed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.start import start_engine
from mismatch_probe.records.sequences import EncodedPrompt, SampledSequence, SampleRequest, ScoredSequence
from tests.cores import every_core

CONTEXT = 192
StartEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def start() -> Iterator[StartEngine]:
    """Starts one small engine at a time, on every core; a new start, or the module's end, closes the one before."""
    running: list[Engine] = []

    def start_one(
        checkpoint: Any,
        dtype: Dtype = Dtype.FP32,
        *,
        prefix_caching: bool = False,
        adapter: Any = None,
        **settings: Any,
    ) -> Engine:
        for engine in running:
            engine.close()
        args = {"max_num_seqs": 32, **settings.pop("args", {})}
        engine = start_engine(
            str(checkpoint),
            dtype,
            EngineSettings(args=args, prefix_caching=prefix_caching, adapter=adapter and str(adapter)),
            SamplingSettings(**settings),
            max_model_len=CONTEXT,
        )
        running[:] = [engine]
        return engine

    with every_core():
        yield start_one
        for engine in running:
            engine.close()


def requests(count: int = 6, first_seed: int = 0) -> list[SampleRequest]:
    """Prompts of 4, 5, ... tokens, each with a seed of its own."""
    return [
        SampleRequest(
            f"r{i}", EncodedPrompt(f"p{i}", [(31 * i + 7 * j) % 250 for j in range(4 + i)], ""), first_seed + i
        )
        for i in range(count)
    ]


def gaps(left: Sequence[ScoredSequence], right: Sequence[ScoredSequence]) -> np.ndarray:
    """Differences of log-probs, all tokens in a row."""
    return np.concatenate([one.logprobs - other.logprobs for one, other in zip(left, right, strict=True)])


def same(left: Sequence[SampledSequence], right: Sequence[SampledSequence]) -> bool:
    """Identical ids and bitwise identical log-probs."""
    return all(
        one.sequence == other.sequence and np.array_equal(one.scores.logprobs, other.scores.logprobs)
        for one, other in zip(left, right, strict=True)
    )
