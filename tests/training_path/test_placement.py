"""Where a device map puts a model: recorded as accelerate chose it, and refused on the CPU and on disk unless asked."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mismatch_probe.config.model import Offload, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.observation import placement, require_as_asked
from tests.training_path.flat import flat

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SPREAD = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture(scope="module")
def spread(checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    """A model that accelerate holds on the CPU and, one layer of it, on disk."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), device_map=SPREAD)
    return model


def check(model: PreTrainedModel, device: torch.device, offload: Offload | None, instead: str | None = None) -> None:
    require_as_asked(Path("M"), model, device, offload, instead=instead)


def test_what_accelerate_chose_is_recorded(spread: PreTrainedModel) -> None:
    assert placement(spread) == SPREAD
    assert placement(AutoModelForCausalLM.from_config(spread.config)) is None


@pytest.mark.parametrize(
    ("device", "offload", "where"),
    [
        (GPU, None, r"5 on the CPU and 1 on disk of 6.*training\.offload = \"disk\""),
        (GPU, "cpu", r"1 on disk of 6.*training\.offload = \"disk\""),
        (CPU, None, r"1 on disk of 6.*training\.offload = \"disk\""),
        (CPU, "cpu", "1 on disk of 6"),
    ],
)
def test_what_was_not_asked_for_is_refused_in_one_sentence(
    spread: PreTrainedModel, device: torch.device, offload: Offload | None, where: str
) -> None:
    with pytest.raises(UsageError, match=where):
        check(spread, device, offload)


def test_what_was_asked_for_is_accepted(spread: PreTrainedModel) -> None:
    check(spread, GPU, "disk")
    check(spread, CPU, "disk")


def test_a_reference_is_not_offloaded_and_told_its_own_way(spread: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match=r"larger GPUs, or hold one layer$"):
        check(spread, GPU, "disk", "hold one layer")


@pytest.mark.slow
def test_without_a_gpu_a_map_is_the_cpu_and_changes_no_number(
    checkpoint: Callable[[str], Path], sequences: list[TokenSequence]
) -> None:
    def scored(**settings: str) -> np.ndarray:
        with Scorer.load(checkpoint("llama"), Dtype.FP32, TrainingPathSettings.model_validate(settings)) as scorer:
            assert scorer.effective_settings()["device"] == "cpu"
            assert scorer.effective_settings()["device_map"] in (None, {"": "cpu"})
            return flat([scorer.score_batch([sequence])[0] for sequence in sequences])

    np.testing.assert_array_equal(scored(device="cpu", device_map="auto"), scored(device="cpu"))
