"""A page for every run: of one response, and of sides that agree to the last bit."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.report import write_report
from tests.simulated_run import Simulation, edit_leg, simulated_run

LEGS = ("infer-bf16-decode", "train-bf16", "ref-fp32")


@pytest.mark.parametrize("num_prompts", [1, 3, 7])
def test_a_run_of_few_responses_has_a_page(tmp_path: Path, num_prompts: int) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=num_prompts), with_summary=True)
    assert "too few responses" in write_report(run).read_text()


def test_sides_that_agree_to_the_last_bit_have_a_page(tmp_path: Path) -> None:
    def certain(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [[0.0] * len(row) for row in columns["logprobs"]]

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=16))
    for leg in LEGS:
        edit_leg(run, leg, certain)
    run.write_summary(summarise(run, run.read_manifest()))
    assert "no deviation" in write_report(run).read_text()
