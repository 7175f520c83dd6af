"""What a run refuses to be continued with, and how it says so."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.run import resume_run
from mismatch_probe.errors import RunDirectoryError
from tests.simulated_run import Simulation, simulated_manifest, simulated_prompts, simulated_run

MADE = Simulation(num_prompts=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_prompts": 3}, r"prompts.num_prompts = 2 \(now 3\)"),
        ({"vllm": "0.99"}, r"vllm 0.32.0 \(now 0.99\)"),
        ({"fingerprint": "checkpoint-b"}, "another model content"),
    ],
)
def test_what_changed_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    now = Simulation(**{"num_prompts": 2, **change})
    simulated_run(tmp_path / "run", MADE)
    with pytest.raises(RunDirectoryError, match=f"was made with {words}"):
        resume_run(tmp_path / "run", Preparation(simulated_manifest(now), simulated_prompts(now)))


def test_a_run_of_a_version_that_knew_other_settings_says_that(tmp_path: Path) -> None:
    simulated_run(tmp_path / "run", MADE)
    now = simulated_manifest(MADE)
    newer = now.model_copy(update={"content_keys": now.content_keys | {"settings": "of more settings"}})
    with pytest.raises(RunDirectoryError, match=r"a mismatch-probe \(.*\) that knew other settings"):
        resume_run(tmp_path / "run", Preparation(newer, simulated_prompts(MADE)))


def test_the_same_continues(tmp_path: Path) -> None:
    simulated_run(tmp_path / "run", MADE)
    run = resume_run(tmp_path / "run", Preparation(simulated_manifest(MADE), simulated_prompts(MADE)))
    assert run.read_manifest().content_keys == simulated_manifest(MADE).content_keys
