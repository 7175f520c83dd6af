"""Real vLLM against itself: alone and among many, with and without the prefix cache."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine, decoded_alone, scored_alone
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest, TokenSequence
from tests.engines.conftest import StartEngine, gaps

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PLAIN = SamplingSettings(max_new_tokens=48)
BLOCK = 32
REQUESTS = [
    SampleRequest(f"r{i}", EncodedPrompt(f"p{i}", [(31 * i + 7 * j) % 250 for j in range(length)], ""), i)
    for i, length in enumerate((1, 20, BLOCK, BLOCK + 1, 70, 90))
]


def sampled(engine: Engine) -> list[TokenSequence]:
    return [one.sequence for one in engine.sample(REQUESTS, PLAIN)]


@pytest.mark.parametrize(("dtype", "served"), [(Dtype.FP32, False), (Dtype.BF16, True)])
def test_alone_among_many_and_behind_the_cache_it_says_the_same(
    start: StartEngine, llama: Path, adapter: Path, dtype: Dtype, served: bool
) -> None:
    engine = start(
        llama,
        dtype,
        prefix_caching=True,
        adapter=adapter if served else None,
        args={"block_size": BLOCK},
        max_new_tokens=48,
    )
    sequences = sampled(engine)
    among = engine.replay(sequences)
    largest = 1e-5 if dtype == Dtype.FP32 else 0.2
    assert np.abs(gaps(scored_alone(engine, sequences), among)).max() < largest
    cached = engine.replay_cached(sequences)
    assert [one.num_cached_tokens for one in cached] == [0, 0, 0, BLOCK, 2 * BLOCK, 2 * BLOCK]
    assert np.abs(gaps([one.scores for one in cached], among)).max() < largest
    again = engine.replay_cached(sequences)
    assert not gaps([one.scores for one in cached], [one.scores for one in again]).any()
    decoded = decoded_alone(engine, REQUESTS, PLAIN, sequences)
    assert [one.id for one in decoded] == [sequence.id for sequence in sequences]
    assert [len(one.logprobs) for one in decoded] == [len(sequence.token_ids) for sequence in sequences]
    assert all(np.isfinite(one.logprobs).all() for one in decoded)
    few = decoded_alone(engine, REQUESTS, PLAIN.model_copy(update={"max_new_tokens": 3}), sequences)
    assert [int(np.isfinite(one.logprobs).sum()) for one in few] == [min(3, len(one.token_ids)) for one in sequences]
    assert all(np.isfinite(one.logprobs[:3]).all() for one in few)


def test_what_came_out_otherwise_ends_with_the_last_token_in_common(start: StartEngine, llama: Path) -> None:
    engine = start(llama, max_new_tokens=48)
    sequences = sampled(engine)
    other = [
        TokenSequence(one.id, one.prompt_token_ids, [*one.token_ids[:2], (one.token_ids[2] + 1) % 250])
        for one in sequences
    ]
    decoded = decoded_alone(engine, REQUESTS, PLAIN, other)
    assert [np.isfinite(one.logprobs).tolist() for one in decoded] == [[True, True, False]] * len(REQUESTS)
    with pytest.raises(UsageError, match=r"without a prefix cache; set engine\.prefix_caching"):
        engine.replay_cached(sequences)


def test_a_stale_cache_is_seen(start: StartEngine, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights change behind an engine that keeps what the old ones cached."""
    from safetensors.torch import load_file

    engine = start(llama, prefix_caching=True, args={"block_size": BLOCK}, max_new_tokens=48)
    sequences = sampled(engine)
    engine.sample(REQUESTS[-1:], PLAIN.model_copy(update={"max_new_tokens": 1}))
    weights = load_file(llama / "model.safetensors")
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)  # type: ignore[attr-defined]
    engine.update_weights((name, weight * 1.1 if "k_proj" in name else weight) for name, weight in weights.items())
    [behind] = engine.replay_cached(sequences[-1:])
    assert behind.num_cached_tokens == 2 * BLOCK
    assert np.abs(gaps([behind.scores], scored_alone(engine, sequences[-1:]))).max() > 1e-3


def test_a_cache_that_is_said_to_be_empty_and_is_not_ends_the_batch(
    start: StartEngine, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(llama, prefix_caching=True, args={"block_size": BLOCK}, max_new_tokens=48)
    again = [*REQUESTS[-1:], *REQUESTS[-1:]]
    assert len(engine.sample(again, PLAIN)) == len(engine.sample(again, PLAIN)) == 2
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=rf"the first request after that took {2 * BLOCK} tokens from it"):
        engine.sample(again, PLAIN)
