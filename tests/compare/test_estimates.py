"""Upper bounds of a dry run, held against what a run really leaves on the disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.compare.estimates import estimate
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.report.page import write_report
from tests.simulated_run import Simulation, simulated_manifest, simulated_prompts, simulated_run

SMALL = Simulation(num_prompts=4, sampling={"max_new_tokens": 300})


def max_disk_bytes(simulation: Simulation, monkeypatch: pytest.MonkeyPatch, *, prompt_tokens: int = 3) -> int:
    monkeypatch.setattr(Preparation, "parameters", 1)
    prompts = [replace(prompt, token_ids=[1] * prompt_tokens) for prompt in simulated_prompts(simulation)]
    return estimate(Preparation(simulated_manifest(simulation), prompts)).max_disk_bytes


@pytest.mark.slow
def test_a_small_run_stays_below_its_bound_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulated_run(tmp_path / "run", SMALL, with_summary=True)
    write_report(run)
    used = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert used <= max_disk_bytes(SMALL, monkeypatch)


def test_prompts_take_their_share_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (max_disk_bytes(SMALL, monkeypatch, prompt_tokens=tokens) for tokens in (10, 10_010))
    assert long - short >= 4 * 10_000 * SMALL.num_prompts * 2, (
        "ids are recorded with the prompts and with the responses"
    )
