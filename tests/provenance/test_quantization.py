"""Which of a side's weights are quantised, and from what."""

from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.provenance.stored_tensors import quantized_facts, stored_quantization
from tests.tiny_models import make_checkpoint, quantise_blocks

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantised") / "plain", "llama", **SHAPE)


@pytest.fixture(scope="module")
def quantised(plain: Path) -> Path:
    return quantise_blocks(make_checkpoint(plain.parent / "fp8", "llama", **SHAPE))


def test_plain_weights_are_quantised_by_who_does_it(plain: Path) -> None:
    assert stored_quantization(plain) is None
    assert quantized_facts(plain, None, Dtype.BF16) is None
    facts = quantized_facts(plain, "fp8_per_channel", Dtype.BF16)
    assert facts is not None
    assert (facts["source"], facts["read_as"], set(facts["stored"])) == ("at load", "bf16", {"fp32"})


def test_a_checkpoint_that_stores_quantised_weights_is_their_source(quantised: Path) -> None:
    facts = quantized_facts(quantised, None, Dtype.BF16, is_expanded=True)
    assert facts is not None
    assert (facts["method"], facts["source"], facts["read_as"], facts["expanded"]) == ("fp8", "checkpoint", None, True)
    assert set(facts["stored"]) == {"bf16", "f8_e4m3", "fp32"}
    assert max(facts["stored"], key=facts["stored"].__getitem__) == "f8_e4m3"
