"""A checkpoint without a tokenizer, compared on prompts given as token ids: real engines, a tiny model."""

import json
from pathlib import Path

import pytest

from mismatch_probe.compare.estimates import DryRun
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import FEW, probe
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow


def test_a_checkpoint_without_a_tokenizer_is_compared_and_the_page_says_what_lacks_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_checkpoint(tmp_path / "model", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (model / name).unlink(missing_ok=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [257, 40, 50 + number]}) + "\n" for number in range(4)))
    words = ["compare", "--model", model, "--prompts", prompts, "--dtype", "bf16", "--max-new-tokens", "16"]
    words += ["--config", FEW]
    answer = probe(*words, "--dry-run", "--json", code=ExitCode.PASS)
    ahead = DryRun.model_validate_json(answer.stdout).outlook
    assert ahead is not None
    assert 0 < ahead.time.total.low_seconds < ahead.time.total.high_seconds
    assert all(number.fits for number in ahead.memory)
    probe(*words, "--dtype", "fp32", "--out", "run", code=ExitCode.PASS)
    run = RunDirectory(tmp_path / "run")
    assert not run.read_manifest().model.has_tokenizer
    assert all((stage.start_seconds or 0) > 0 for stage in run.read_manifest().stages.values())
    assert [pair.verdict.kind for pair in run.read_summary().pairs] == ["precision", "clean"]
    assert run.read_summary().pairs[0].worst_tokens[0].token.startswith("<id ")
    page = run.report_path.read_text()
    assert "has no tokenizer" in page
    probe("headroom", "--run", "run", code=ExitCode.PASS)
