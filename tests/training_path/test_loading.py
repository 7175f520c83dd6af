"""Each checkpoint, device or setting that cannot be used ends in one sentence."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.config.model import Attention, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, MismatchProbeError, MissingExtra, UsageError
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.loading import choose_attention, choose_device
from tests.tiny_models import make_checkpoint
from tests.warm_python import warm_python


def load(folder: Path, **settings: Any) -> Scorer:
    return Scorer.load(folder, Dtype.FP32, TrainingPathSettings(**settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama")


def one_sentence(error: pytest.ExceptionInfo[MismatchProbeError]) -> bool:
    return "\n" not in str(error.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing-here is not a folder; give --model") as error:
        load(tmp_path / "nothing-here")
    assert one_sentence(error)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no config\.json") as error:
        load(tmp_path)
    assert one_sentence(error)


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json cannot be read") as error:
        load(folder)
    assert one_sentence(error)


def test_an_architecture_nobody_knows(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "from-the-future"}))
    with pytest.raises(UsageError, match=r"from-the-future.*upgrade transformers") as error:
        load(folder)
    assert one_sentence(error)


def test_an_architecture_without_a_causal_language_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UsageError, match="is a clip model, which has no causal language model") as error:
        load(folder)
    assert one_sentence(error)


@pytest.mark.parametrize("kept_bytes", [0, 100, 5000])
def test_a_truncated_weight_file(folder: Path, kept_bytes: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(UsageError, match=r"a weight file of .* is broken") as error:
        load(folder)
    assert one_sentence(error)


def test_an_absent_weight_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"the weights of .* cannot be read") as error:
        load(folder)
    assert one_sentence(error)


def test_a_weight_that_would_be_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 weight .* such as model\.layers\.1\.mlp\.up_proj") as error:
        load(folder)
    assert one_sentence(error)


def test_a_weight_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(EngineError, match="cannot be loaded") as error:
        load(folder)
    assert one_sentence(error)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed here")
def test_attention_is_chosen_by_the_architecture_and_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def chosen(family: str, attention_asked_for: Attention | None = None) -> Attention:
        folder = tmp_path / family
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        return choose_attention(folder, attention_asked_for, trust_remote_code=False)

    assert [chosen(family) for family in ("llama", "gemma2", "gpt_oss")] == ["sdpa", "eager", "eager"]
    assert chosen("gemma2", "sdpa") == "sdpa", "what a trainer does can be measured"
    with pytest.raises(UsageError, match=r"gpt_oss model, which has no sdpa attention.*training.attention .* to eager"):
        chosen("gpt_oss", "sdpa")
    with pytest.raises(UsageError, match="no causal language model"):
        chosen("clip")


def test_an_attention_that_is_not_installed(folder: Path) -> None:
    with pytest.raises(MissingExtra, match=r"flash_attention_2.*set training.attention .* to sdpa or eager") as error:
        load(folder, attention="flash_attention_2")
    assert one_sentence(error)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("gpu", "not a device's name"), ("meta", "cannot be used for scoring"), ("cuda:99", "is not there")],
)
def test_a_device_that_is_not_there(folder: Path, device: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"{reason}.*set training.device .* to auto, cpu, cuda") as error:
        load(folder, device=device)
    assert one_sentence(error)


def test_a_device_map_is_accepted(folder: Path) -> None:
    with load(folder, device_map="cpu") as scorer:
        assert scorer.effective_settings()["device"] == "cpu"


@pytest.mark.slow
def test_running_out_of_host_memory_names_the_setting_to_halve(checkpoint: Callable[[str], Path]) -> None:
    done = warm_python("tests.training_path.limited_addresses", checkpoint("llama"))
    assert "out of memory while scoring 1 sequences" in done.stdout
    assert "halve training.batch_tokens (now 8192)" in done.stdout


def test_a_rank_computes_on_the_gpu_that_torchrun_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:3")
    assert choose_device("cuda:1") == torch.device("cuda:1")


def test_a_head_of_its_own_format_leaves_the_model_in_evaluation_mode(folder: Path) -> None:
    with load(folder, lm_head_dtype=Dtype.FP32) as scorer:
        assert scorer.effective_settings()["dropout"] == "off"
