"""Runs that were made with code of a checkpoint: no command runs it unless it is told so now."""

import json
from pathlib import Path

import pytest

from mismatch_probe.provenance import checkpoint
from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import CommandLine
from tests.report.training.training_runs import training_run
from tests.simulated_run import Simulation, simulated_run
from tests.tiny_models import make_checkpoint

SMALL = ("--num-prompts", 2, "--samples-per-prompt", 2, "--max-new-tokens", 4)
EVIL = """
from pathlib import Path
from transformers import LlamaConfig
Path({touched!r}).touch()
class EvilConfig(LlamaConfig):
    model_type = "evil"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint whose configuration is code that makes the file `touched`."""
    folder = make_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "evil.py").write_text(EVIL.format(touched=str(tmp_path / "touched")))
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> RunDirectory:
    """A comparison that says it was made of that checkpoint, with its code."""
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=4, mean_length=20), with_summary=True)
    text = run.manifest_path.read_text()
    manifest = json.loads(text)
    manifest["settings"]["model"] = {"path": str(model), "trust_remote_code": True}
    manifest["settings"]["prompts"]["source"] = "sums:easy"
    manifest["model"] |= {"folder": str(model), "fingerprint": checkpoint.fingerprint(model)}
    run.manifest_path.write_text(json.dumps(manifest))
    return run


def test_no_command_takes_the_trust_of_a_run_directory(
    run: RunDirectory, tmp_path: Path, command_line: CommandLine
) -> None:
    for words in (
        ("compare", "--resume", "--out", run.path),
        ("compare", "--resume", "--out", run.path, "--dry-run"),
        ("headroom", "--run", run.path, *SMALL),
        ("localize", "--run", run.path, "--dtype", "bf16"),
        ("diff", run.path, run.path, "--rescore", "--out", tmp_path / "rescored"),
    ):
        ended = command_line(*words)
        sentence = "was made with --trust-remote-code: what runs code is not taken from a run directory"
        assert (ended.code, sentence in ended.stderr) == (2, True), (words, ended.stderr)
    assert not (tmp_path / "touched").exists()


def test_no_training_takes_the_trust_of_a_run_directory(tmp_path: Path, command_line: CommandLine) -> None:
    directory = training_run(tmp_path / "trained")
    manifest = json.loads(directory.manifest_path.read_text())
    manifest["settings"]["model"]["trust_remote_code"] = True
    manifest["settings"]["task"]["reward"] = "evil:reward"
    directory.manifest_path.write_text(json.dumps(manifest))
    for words in (("train", "--resume"), ("train", "--canary", "--resume")):
        ended = command_line(*words, "--out", directory.path)
        assert ended.code == 2, ended
        assert "was made with --trust-remote-code --reward evil:reward: what runs code" in ended.stderr
        again = command_line(*words, "--out", directory.path, "--trust-remote-code")
        assert "was made with --reward evil:reward: what runs code" in again.stderr


def test_trust_that_is_given_now_counts(run: RunDirectory, tmp_path: Path, command_line: CommandLine) -> None:
    ended = command_line("headroom", "--run", run.path, *SMALL, "--trust-remote-code")
    assert "what runs code" not in ended.stderr
    assert (tmp_path / "touched").exists()
