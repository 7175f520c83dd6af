"""Adapters, merged for the engine and for a checkpoint, compute what they compute beside the weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.train import LoraSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from tests.tiny_models import make_checkpoint

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:The following \\w+_pattern keys:RuntimeWarning"),
]


def logprobs(policy: Policy, rollouts: list[Rollout]) -> np.ndarray:
    batch: list[TokenSequence] = [rollout.sequence for rollout in rollouts]
    with torch.no_grad(), policy.computing():
        return policy.logprobs(batch)[0].double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_merged_adapters_compute_what_they_compute_beside_the_weights(
    family: str, rollouts: list[Rollout], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    adapted = Policy(folder, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4, alpha=16)), temperature=1.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.trainable():
            torch.nn.init.normal_(parameter.to_local(), std=0.1, generator=generator)  # type: ignore[attr-defined]
    adapted.save(tmp_path / "merged")
    beside = logprobs(adapted, rollouts)
    merged = logprobs(Policy(tmp_path / "merged", Dtype.FP32, PolicySettings(), temperature=1.0), rollouts)
    unadapted = logprobs(Policy(folder, Dtype.FP32, PolicySettings(), temperature=1.0), rollouts)
    assert np.abs(beside - merged).max() < 1e-4
    assert np.abs(beside - unadapted).max() > 1e-2


@pytest.mark.slow
def test_every_adapter_of_a_mixture_of_experts_learns(rollouts: list[Rollout], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3-moe", "qwen3-moe")
    policy = Policy(folder, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4)), temperature=1.0)
    with policy.computing():
        policy.logprobs([rollout.sequence for rollout in rollouts])[0].sum().backward()
    gradients = {name: p.grad for name, p in policy.module.named_parameters() if "lora_B" in name}
    assert any("experts" in name for name in gradients)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.full_tensor().abs().max() > 0, name  # type: ignore[attr-defined]
