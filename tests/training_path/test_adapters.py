"""A saved adapter beside the weights and merged into them, in every way that a trainer holds them."""

from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.scorer import Scorer
from tests.adapters import make_adapter
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

SEQUENCES = [TokenSequence(f"s{number}", [1, 2, 3, 4 + number], list(range(20, 50 + number))) for number in range(3)]
MODES = ("weights", "to", "autocast", "fsdp")


def settings(adapter: Path | None, *, merged: bool = False, precision: str = "weights") -> TrainingPathSettings:
    given = {"device": "cpu", "precision": precision, "adapter_merged": merged}
    return parse_settings(TrainingPathSettings, given | ({} if adapter is None else {"adapter": str(adapter)}))


def scored(scorer: Scorer) -> np.ndarray:
    with scorer:
        return np.concatenate([scores.logprobs for scores in scorer.score_batch(SEQUENCES)])


@pytest.fixture(scope="module")
def truth(llama: Path, adapter: Path) -> np.ndarray:
    """By peft's own model in FP32."""
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    rows = []
    for sequence in SEQUENCES:
        ids = torch.tensor([[*sequence.prompt_token_ids, *sequence.token_ids]])
        with torch.inference_mode():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(1, ids[0, 1:, None])[-len(sequence.token_ids) :, 0].numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("merged", [False, True])
def test_in_fp32_every_way_computes_what_peft_computes(
    llama: Path, adapter: Path, truth: np.ndarray, merged: bool, precision: str
) -> None:
    scorer = Scorer.load(llama, Dtype.FP32, settings(adapter, merged=merged, precision=precision))
    held = scorer.effective_settings()["adapter"]
    assert (held["merged"], held["rank"], held["alpha"], held["num_modules"]) == (merged, 4, 16.0, 14)
    assert scorer.effective_settings()["dropout"] == "off"
    np.testing.assert_allclose(scored(scorer), truth, atol=5e-5)


def test_without_the_adapter_and_with_another_scale_it_computes_something_else(
    llama: Path, adapter: Path, truth: np.ndarray, tmp_path: Path
) -> None:
    plain = Scorer.load(llama, Dtype.FP32, settings(None))
    assert plain.effective_settings()["adapter"] is None
    assert np.abs(scored(plain) - truth).mean() > 0.5
    louder = Path(copytree(adapter, tmp_path / "louder"))
    config = (louder / "adapter_config.json").read_text()
    (louder / "adapter_config.json").write_text(config.replace('"lora_alpha": 16', '"lora_alpha": 32'))
    assert np.abs(scored(Scorer.load(llama, Dtype.FP32, settings(louder))) - truth).mean() > 0.5


def test_in_16_bit_the_formats_are_those_of_the_mode_and_merging_rounds_once(
    llama: Path, adapter: Path, truth: np.ndarray
) -> None:
    beside = Scorer.load(llama, Dtype.BF16, settings(adapter))
    assert set(beside.effective_settings()["parameter_dtypes"]) == {"bf16"}
    merged = Scorer.load(llama, Dtype.BF16, settings(adapter, merged=True))
    assert merged.effective_settings()["parameter_dtypes"] == {"bf16": 115008}
    cast = Scorer.load(llama, Dtype.BF16, settings(adapter, merged=True, precision="fsdp"))
    one, two, three = scored(beside), scored(merged), scored(cast)
    assert 1e-3 < np.abs(one - two).mean() < 0.1
    assert np.abs(two - truth).mean() < 0.1
    np.testing.assert_array_equal(two, three)


def test_the_reference_has_the_adapter_and_rounds_it_with_the_weights(
    llama: Path, adapter: Path, truth: np.ndarray
) -> None:
    given = Scorer.load(llama, Dtype.FP32, settings(adapter), reference=True)
    assert given.weight_cast.is_exact
    np.testing.assert_allclose(scored(given), truth, atol=5e-5)
    rounded = Scorer.load(llama, Dtype.FP32, settings(adapter), reference=True, rounded_to=Dtype.BF16)
    assert not rounded.weight_cast.is_exact
    assert 1e-4 < np.abs(scored(rounded) - truth).mean() < 0.1


def test_an_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    wider = make_checkpoint(tmp_path / "wider", "llama", hidden_size=96)
    with pytest.raises(UsageError, match="does not fit the model"):
        Scorer.load(llama, Dtype.FP32, settings(make_adapter(tmp_path / "other", wider)))
    deeper = make_checkpoint(tmp_path / "deeper", "llama", num_hidden_layers=3)
    with pytest.raises(UsageError, match="does not fit the model"):
        Scorer.load(llama, Dtype.FP32, settings(make_adapter(tmp_path / "another", deeper)))


def test_merging_without_an_adapter_is_refused() -> None:
    with pytest.raises(UsageError, match="adapter_merged merges an adapter, and none is given"):
        settings(None, merged=True)
