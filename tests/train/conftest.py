"""What the tests of training share: a process group of one, tiny checkpoints, responses to learn from."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.distributed import join_process_group
from mismatch_probe.train.rollouts import Rollout
from tests.tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("train-models") / "llama", "llama", num_hidden_layers=1)


@pytest.fixture
def process_group() -> Iterator[None]:
    another_test_left_one = dist.is_initialized()
    join_process_group(torch.device("cpu"))
    yield
    if not another_test_left_one:
        dist.destroy_process_group()


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Four samples of each of three prompts, lengths 3 to 14, rewards that differ within each group."""
    random = np.random.default_rng(0)
    found = []
    for row in range(12):
        length = int(random.integers(3, 15))
        ids = random.integers(0, 250, 6 + length).tolist()
        found.append(
            Rollout(
                sequence=TokenSequence(f"row-{row}", ids[:6], ids[6:]),
                mu_logprobs=-random.exponential(2.0, length),
                prompt_id=f"prompt-{row // 4}",
                reward=float(row % 4 == 0 or row % 3 == 0),
                truncated=False,
                text="",
            )
        )
    return found
