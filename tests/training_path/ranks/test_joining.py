"""What a rank takes before it holds a part: its GPU, its patience, and the memory for a pass of the whole model."""

import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_probe.children.start import RankPlace
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.checkpoint import num_parameters
from mismatch_probe.training_path import Scorer, rank_group
from mismatch_probe.training_path import memory as measured
from mismatch_probe.training_path.rank_sharding import whole_pass
from tests.tiny_models import make_checkpoint


def test_a_rank_waits_for_one_that_loads_as_long_as_the_group_does(tmp_path: Path) -> None:
    place = RankPlace(rank=1, ranks=2, local_rank=1, local_ranks=2, meeting=f"file:{tmp_path / 'meeting'}")
    assert rank_group._open_store(place).timeout == timedelta(minutes=30)


def test_ranks_on_the_cpu_may_outnumber_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    backends = [rank_group._backend(RankPlace(rank, 2, rank, 2, "file:meeting")) for rank in range(2)]
    assert backends == ["cpu:gloo,cuda:nccl"] * 2
    assert taken == [0]


def test_the_whole_model_is_not_loaded_where_a_limit_leaves_no_room(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = measured._process_bytes()["VmData:"]
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: taken}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert not has_room(llama, Dtype.FP32)


def test_the_whole_model_in_fp64_takes_twice_the_room(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = num_parameters(llama) * 4 * 3
    monkeypatch.setattr("mismatch_probe.training_path.rank_sharding.free_memory", lambda device: free)
    assert has_room(llama, Dtype.BF16)
    assert has_room(llama, Dtype.FP32)
    assert not has_room(llama, Dtype.FP64)


class LoadedError(Exception):
    pass


def has_room(folder: Path, dtype: Dtype) -> bool:
    """Whether the whole model would be loaded."""

    def load(settings: TrainingPathSettings) -> Any:
        raise LoadedError

    try:
        pass_of_all = whole_pass(folder, dtype, TrainingPathSettings(ranks=1), torch.device("cpu"), load)
    except LoadedError:
        return True
    assert pass_of_all is not None
    assert pass_of_all.why_not is not None
    assert pass_of_all.why_not.startswith("the whole model may take")
    return False


@pytest.mark.slow
def test_the_scale_of_embeddings_is_rounded_with_the_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma2", hidden_size=96)  # the root of 96 is no number of BF16
    settings = TrainingPathSettings(ranks=1)
    with Scorer.load(folder, Dtype.FP32, settings, reference=True, rounded_to=Dtype.BF16) as scorer:
        assert scorer.effective_settings()["ranks"]["against_whole"] == {"difference": 0.0, "why_not": None}
