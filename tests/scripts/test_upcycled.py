"""A mixture of experts from the shipped checkpoint: without noise the dense model, with noise experts that differ."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mismatch_probe.demo_checkpoint
from scripts import upcycled

pytestmark = pytest.mark.slow

DENSE = Path(mismatch_probe.demo_checkpoint.__file__).parent
IDS = torch.arange(3, 43)[None]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
    return result


def test_without_noise_the_mixture_computes_what_the_dense_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upcycled, "NOISE", 0.0)
    upcycled.upcycle(DENSE, tmp_path)
    torch.testing.assert_close(logits(tmp_path), logits(DENSE), atol=1e-3, rtol=1e-3)


def test_with_noise_the_experts_differ_and_the_tokenizer_is_there(tmp_path: Path) -> None:
    upcycled.upcycle(DENSE, tmp_path)
    assert (logits(tmp_path) - logits(DENSE)).abs().max() > 0.1
    assert (tmp_path / "tokenizer.json").read_bytes() == (DENSE / "tokenizer.json").read_bytes()
