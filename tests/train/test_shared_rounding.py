"""Shared prefixes, and sequences computed one beside the other, are held against FP64: neither errs more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.policy import Policy
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.prefixes import SharedPrefixes, StateBatch, share_prefixes
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

DTYPES = (Dtype.FP32, Dtype.BF16, Dtype.FP16)
FAMILIES = ("llama", "qwen3", "qwen3-moe", "mistral-sliding")
TEMPERATURE = 0.7
MOST_OF_UNSHARED = 1.1
"""Two computations that round apart were 0.96 to 1.02 of each other in the root mean square over these tokens."""


def group() -> list[TokenSequence]:
    """Six samples of each of two prompts that begin alike; some samples have more than the prompt in common."""
    random = np.random.default_rng(1)
    responses = [random.integers(0, 250, int(random.integers(10, 30))).tolist() for _ in range(12)]
    responses[1][:8] = responses[0][:8]
    responses[2][:4] = responses[0][:4]
    prompts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 11]]
    return [TokenSequence(f"{row}", prompts[row % 2], ids) for row, ids in enumerate(responses)]


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def errors(folder: Path, dtype: Dtype) -> tuple[float, float]:
    """Of shared prefixes and of padded sequences: the root mean square error against FP64, in nats."""
    with Scorer.load(folder, Dtype.FP64, TrainingPathSettings(), reference=True, temperature=TEMPERATURE) as scorer:
        truth = np.concatenate([scorer.score_batch([one])[0].logprobs for one in group()])
    policy = Policy(folder, dtype, PolicySettings(), temperature=TEMPERATURE)
    assert policy.shares_prefixes
    found = []
    for shares in (True, False):
        policy.shares_prefixes = shares
        with torch.no_grad(), policy.computing():
            found.append(root_mean_square(policy.logprobs(group())[0].double().numpy() - truth))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefixes_err_no_more_than_padded_sequences(family: str, dtype: Dtype, tmp_path: Path) -> None:
    shared, padded = errors(make_checkpoint(tmp_path / family, family), dtype)
    assert 0 < shared < MOST_OF_UNSHARED * padded


def positions_off_by_one(batch: StateBatch) -> StateBatch:
    """From the fifth token on; rotary positions that are all shifted alike would change nothing."""
    positions_BS = batch.position_ids_BS
    assert positions_BS is not None
    return replace(batch, position_ids_BS=positions_BS + (positions_BS > 4).long())


def another_samples_tokens(batch: StateBatch) -> StateBatch:
    """In attention, the tokens 10 to 13 of every sequence are those of its neighbour."""
    prefixes = batch.prefixes
    assert prefixes is not None
    states_RS = prefixes.states_RS.clone()
    states_RS[:, 10:14] = states_RS.roll(1, dims=0)[:, 10:14]
    return replace(batch, prefixes=SharedPrefixes(states_RS, prefixes.places_U))


def tokens_to_come(batch: StateBatch) -> StateBatch:
    """The last token of the first sequence is seen by those before it."""
    prefixes = batch.prefixes
    assert prefixes is not None
    states_RS = prefixes.states_RS.clone()
    length = len(set(states_RS[0].tolist()))
    states_RS[0, length - 5] = states_RS[0, length - 1]
    return replace(batch, prefixes=SharedPrefixes(states_RS, prefixes.places_U))


def answers_of_the_token_before(batch: StateBatch) -> StateBatch:
    return replace(batch, states_Q=(batch.states_Q - 1).clamp(min=0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fault", [positions_off_by_one, another_samples_tokens, tokens_to_come, answers_of_the_token_before]
)
def test_a_fault_of_the_layout_is_no_rounding(
    fault: Callable[[StateBatch], StateBatch],
    dtype: Dtype,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mismatch_probe.train.sharded.share_prefixes", lambda batch: fault(share_prefixes(batch)))
    shared, padded = errors(llama, dtype)
    assert shared > 2 * padded
