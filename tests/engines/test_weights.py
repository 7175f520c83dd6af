"""Weights sent to a running engine: whatever the family, it computes with all of them and none of the old ones."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.config.train import LoraSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError
from mismatch_probe.train.distributed import join_process_group
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.weight_sync import Metrics, WeightSync
from tests.engines.conftest import StartEngine, requests
from tests.tiny_models import FAMILIES, make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FP32_FLOOR = 1e-11
"""Nats a token between two FP32 implementations that hold the same weights."""


Weights = Iterable[tuple[str, torch.Tensor]]


def move(policy: Policy) -> None:
    """Each weight by a tenth of its tensor's spread."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.add_(torch.randn(local.shape, generator=generator) * (0.1 * local.std() + 0.01))


def all_arrived(found: Metrics) -> bool:
    return {name: found[f"sync/weights_{name}"] for name in ("unchanged", "other", "compared")} == {
        "unchanged": 0,
        "other": 0,
        "compared": 1,
    }


def syncs(
    start: StartEngine,
    folder: Path,
    dtype: Dtype,
    settings: PolicySettings,
    spoiled: Callable[[Weights], Weights] = iter,
) -> list[Metrics]:
    """What a sync says at first and after each of two moves; `spoiled` changes weights on their way."""
    join_process_group(torch.device("cpu"))
    with start(folder, dtype) as engine:
        sampled = engine.sample(requests(), SamplingSettings(max_new_tokens=32))
        policy = Policy(folder, dtype, settings, temperature=1.0)
        sync = WeightSync(policy, engine, dtype, [response.sequence for response in sampled])
        take = engine.update_weights
        engine.update_weights = lambda weights: take(spoiled(weights))  # type: ignore[method-assign]
        found = [sync()]
        for _ in range(2):
            move(policy)
            found.append(sync())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_computes_with_every_weight_it_is_sent(family: str, start: StartEngine, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    first, *moved = syncs(start, folder, Dtype.FP32, PolicySettings(attention="eager"))
    assert first["sync/probe_k3"] < FP32_FLOOR
    for found in (first, *moved):
        assert all_arrived(found)
    for found in moved:
        assert found["update/policy_shift_k3"] > 0.01
        assert found["sync/probe_k3"] < FP32_FLOOR


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_an_engine_computes_with_adapters_that_were_merged(family: str, start: StartEngine, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    first, *moved = syncs(start, folder, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4)))
    assert first["sync/probe_k3"] < FP32_FLOOR
    for found in moved:
        assert found["update/policy_shift_k3"] > 0.01
        assert found["sync/probe_k3"] < FP32_FLOOR


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_kernels_of_sixteen_bits_take_new_weights_too(
    family: str, dtype: Dtype, start: StartEngine, tmp_path: Path
) -> None:
    for found in syncs(start, make_checkpoint(tmp_path / family, family), dtype, PolicySettings())[1:]:
        assert found["sync/probe_k3"] < 0.01 * found["update/policy_shift_k3"]
        assert all_arrived(found)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_weight_that_is_one_hundredth_off_in_bf16_is_told_and_not_by_the_probe(
    family: str, start: StartEngine, tmp_path: Path
) -> None:
    def spoiled(weights: Weights) -> Weights:
        return ((name, tensor * 1.01 if ".1.self_attn.k_proj" in name else tensor) for name, tensor in weights)

    found = syncs(start, make_checkpoint(tmp_path / family, family), Dtype.BF16, PolicySettings(), spoiled)
    assert [one["sync/weights_other"] for one in found] == [1, 1, 1]
    assert found[0]["sync/probe_logit_error"] < 0.05


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_layer_that_never_arrives_is_told(family: str, start: StartEngine, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    old = load_file(folder / "model.safetensors")

    def kept(weights: Weights) -> Weights:
        return ((name, old[name].to(tensor.dtype) if ".1.mlp." in name else tensor) for name, tensor in weights)

    first, *moved = syncs(start, folder, Dtype.BF16, PolicySettings(), kept)
    assert all_arrived(first)
    assert all(one["sync/weights_unchanged"] == 2 for one in moved)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_what_is_not_packed_again_shows_in_the_probe(
    family: str, start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mismatch_probe.engines.vllm.worker import ProbeWorker

    monkeypatch.setattr(ProbeWorker, "probe_repack", lambda self: None)
    found = syncs(start, make_checkpoint(tmp_path / family, family), Dtype.FP32, PolicySettings())[-1]
    assert found["sync/probe_k3"] > 0.01


def test_an_engine_that_keeps_its_prefix_cache_at_a_sync_is_an_error(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(make_checkpoint(tmp_path / "llama", "llama"), prefix_caching=True) as engine:
        monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(EngineError, match="vLLM kept its prefix cache"):
            engine.update_weights(load_file(tmp_path / "llama" / "model.safetensors").items())
