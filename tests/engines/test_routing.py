"""The experts that real vLLM and the training path choose for the same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.errors import RoutingUnseen
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.subsamples import other_experts, weight_distance
from mismatch_probe.training_path.scorer import Scorer
from tests.engines.conftest import StartEngine, requests
from tests.tiny_models import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts") / "moe", "qwen3-moe")


def sampled(engine: Engine) -> list[TokenSequence]:
    return [one.sequence for one in engine.sample(requests(), SamplingSettings(max_new_tokens=32))]


def pi(checkpoint: Path, dtype: Dtype) -> Scorer:
    return Scorer.load(checkpoint, dtype, TrainingPathSettings(device="cpu"))


def shares(first: list[SequenceRouting], second: list[SequenceRouting]) -> tuple[float, float]:
    """Over all layers, the share of tokens with another set of experts and the mean distance of the weights."""
    pairs = list(zip(first, second, strict=True))
    others = np.concatenate([other_experts(a.experts, b.experts).ravel() for a, b in pairs])
    distances = [weight_distance(a.experts, a.weights, b.experts, b.weights).ravel() for a, b in pairs]
    return float(others.mean()), float(np.concatenate(distances).mean())


def test_in_fp32_both_sides_choose_the_same_experts_and_weigh_them_alike(start: StartEngine, checkpoint: Path) -> None:
    engine = start(checkpoint, max_new_tokens=32)
    sequences = sampled(engine)
    before = engine.replay(sequences)
    mu = engine.routing(sequences)
    for one, other in zip(before, engine.replay(sequences), strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    with pi(checkpoint, Dtype.FP32) as scorer:
        same = scorer.routing(sequences)
    assert [one.id for one in mu] == [one.id for one in same] == [sequence.id for sequence in sequences]
    assert {one.experts.shape for one in mu} == {(2, sequence.num_tokens - 1, 2) for sequence in sequences}
    others, distance = shares(mu, same)
    assert (others, distance < 1e-5) == (0.0, True)
    with pi(_other_router(checkpoint), Dtype.FP32) as scorer:
        others, distance = shares(mu, scorer.routing(sequences))
    assert others > 0.05
    assert distance > 0.05


def test_in_bf16_rounding_turns_a_few_near_ties(start: StartEngine, checkpoint: Path) -> None:
    engine = start(checkpoint, Dtype.BF16, max_new_tokens=32)
    sequences = sampled(engine)
    with pi(checkpoint, Dtype.BF16) as scorer:
        others, distance = shares(engine.routing(sequences), scorer.routing(sequences))
    assert 0 <= others < 0.2
    assert 1e-4 < distance < 0.1


def test_a_dense_model_has_no_choice_to_read(start: StartEngine, tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    engine = start(dense, max_new_tokens=32)
    sequences = sampled(engine)
    with pytest.raises(RoutingUnseen, match="no router of this engine"):
        engine.routing(sequences)
    with pi(dense, Dtype.FP32) as scorer, pytest.raises(RoutingUnseen, match="hands no choice of experts"):
        scorer.routing(sequences)


def _other_router(checkpoint: Path) -> Path:
    """The checkpoint with the first layer's router turned a little."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        gate = model.model.layers[0].mlp.gate.weight
        gate += 0.3 * gate.std() * torch.randn(gate.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(checkpoint.parent / "turned")
    return checkpoint.parent / "turned"
