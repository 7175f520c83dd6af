"""What models over ranks need is found out before anything is sampled, and what they cannot compute is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig

from mismatch_probe.compare import preflight
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.scoring_job import _ScoringStages, _why_no_floor
from mismatch_probe.compare.stages import ScoreStage
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.errors import UsageError
from tests.simulated_run import Simulation, simulated_run

TWO = {"name": "two", "dtype": "bf16", "ranks": 4}


def settings(folder: Path, **given: Any) -> CompareSettings:
    values = {"model": {"path": str(folder)}, "train": [TWO], "pairs": [("two", "bf16"), ("bf16", "bf16")]}
    return parse_settings(CompareSettings, {**values, **given})


def settings_of(folder: Path, **given: Any) -> dict[str, Any]:
    """What the command has its job check."""
    ranks_here = preflight._ranks_here(settings(folder, **given))
    return {
        "folder": str(folder), "folders": [str(folder)], "trust_remote_code": False, "attention": None,
        "device": "auto", "chat_template": "auto", "vocabulary": 320, "context_length": 64,
        "ranks_here": ranks_here, "tensor_parallel": [1], "by_layer": False,
    }  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 3])
def test_ranks_that_outnumber_the_gpus_are_refused_and_on_a_cpu_they_are_not(
    gpus: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = json.dumps([])
    assert preflight.check(lambda message: None, settings_of(llama), prompts)["prompts"] == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UsageError, match=f"4 ranks on this machine take a GPU each, and PyTorch sees {gpus}; give"):
        preflight.check(lambda message: None, settings_of(llama), prompts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert preflight.check(lambda message: None, settings_of(llama), prompts)["prompts"] == []


def test_the_floor_of_an_attention_that_an_architecture_does_not_have_is_left_out(tmp_path: Path) -> None:
    """Before a model is loaded: what one of several ranks meets ends them all."""
    GptOssConfig().save_pretrained(tmp_path / "gpt-oss")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    side = settings(tmp_path).train_sides[0]
    words = "transformers has no sdpa attention for gpt_oss models"
    assert _why_no_floor("sdpa", tmp_path / "gpt-oss", side) == words
    assert _why_no_floor("eager", tmp_path / "gpt-oss", side) is None
    assert _why_no_floor("sdpa", tmp_path / "llama", side) is None


def test_a_leg_that_is_begun_keeps_its_threads_and_another_takes_a_share(tmp_path: Path) -> None:
    """Also where the command was killed before it noted the first batch, whose rows are there."""
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2))
    manifest = run.read_manifest()
    stage = next(stage for stage in make_plan(manifest.settings).stages if isinstance(stage, ScoreStage))
    record = manifest.stages[stage.name]
    record.effective_settings = {}
    assert _ScoringStages(run, manifest, lambda event: None)._num_threads([stage]) is None
    record.effective_settings, record.batches_done = {"num_threads": 3}, 0
    assert _ScoringStages(run, manifest, lambda event: None)._num_threads([stage]) == 3
